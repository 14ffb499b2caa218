-- ARGV: now, namespace, lease ms, session, engine, hashes...
-- -> depth, lease end, whether more is being saved, then node, incarnation, start, stop, ranks
--    per slice
begin()
local ns, engine = ARGV[2], ARGV[5]
local slices = {}

local function piece(r, idx, start, stop)
  if stop <= start then return start end
  local node, last = node_at(idx), slices[#slices]
  if last and last[1] == node and last[3] == start and last[4] == r.ranks then
    last[3] = stop
  else
    slices[#slices + 1] = {node, start, stop, r.ranks}
  end
  return stop
end

local function copy_used(r, idx)
  call('ZADD', K .. 'cp:' .. node_at(idx).place, now, r.id)
end

-- where to load (r.start, upto] from: the home, else the run's own node, else the longest copy
local function sources(r, upto, home)
  local own, at, at_home, longest = reachable(r.node, r.epoch), r.start, nil, nil
  for _, c in ipairs(copies_of(r)) do
    if reachable(c[1], c[2]) then
      if c[1] == home then at_home = at_home or c end
      if not longest or c[3] > longest[3] or (c[3] == longest[3] and c[1] < longest[1]) then
        longest = c
      end
    end
  end
  if at_home and not (own and r.node == home) then
    at = piece(r, home, at, min(upto, at_home[3]))
    copy_used(r, home)
  end
  if own then
    piece(r, r.node, at, upto)
  elseif longest then
    piece(r, longest[1], at, min(upto, longest[3]))
    copy_used(r, longest[1])
  end
end

-- whether one of the first `count` candidates is part of a save under way
local function pending(count)
  if count == 0 then return 0 end
  local keys = {}
  for i = 1, count do keys[i] = ns .. ARGV[5 + i] end
  for idx = 1, M.nodes do
    local node = node_at(idx)
    if node.granted > 0 then
      for _, grant in ipairs(call('HMGET', K .. 'gh:' .. node.place, unpack(keys))) do
        if grant then return 1 end
      end
    end
  end
  return 0
end

local path
local listed = call('HMGET', K .. 'e:' .. ns, unpack(ARGV, 6))
local deeper = #ARGV - 5
for i = 1, #ARGV - 5 do
  if listed[i] then
    path = walk(entry_of(listed[i]))
    deeper = i - 1
    break
  end
end
local more = pending(deeper)
if not path then return done({0, 0, more}) end
local s = session_of(ARGV[4])
local home = s and s.home or 0
local last
for i = #path, 1, -1 do
  local r, depth = path[i][1], path[i][2]
  local upto = min(depth, live_stop(r))
  sources(r, upto, home)
  if #slices > C_SLICES_MAX then
    slices[#slices] = nil
    upto = r.start
  end
  if upto > r.start then last = {r, upto} end
  if upto < depth then break end
end
if not last then return done({0, 0, more}) end
local r, depth = last[1], last[2]
local till = now + tonumber(ARGV[3])
local mark = mark_at(r, depth)
r.free = false
add_lease(r, depth, till)
add_mark(r, depth, now, mark and mark[3] or 0)
settle(r)
if s then used_by(s, engine) end
flush()
local reply = {depth, till, more}
for _, p in ipairs(slices) do
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] =
    p[1].name, p[1].inc, p[2], p[3], p[4]
end
return reply
