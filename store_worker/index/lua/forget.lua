-- ARGV: now, namespace, node or '', hashes... -> victims
call('DEL', K .. 'none')
begin()
local name = ARGV[3]
local order, lost = {}, {}
local got = call('HMGET', K .. 'e:' .. ARGV[2], unpack(ARGV, 4))
for i = 1, #ARGV - 3 do
  local r, depth = entry_of(got[i])
  if r and (lost[r.id] or #order < C_FORGET_RUNS_MAX) then
    if not lost[r.id] then
      order[#order + 1] = r
      lost[r.id] = {depth, depth}
    end
    local l = lost[r.id]
    l[1], l[2] = min(l[1], depth), max(l[2], depth)
  end
end
for _, r in ipairs(order) do
  local low, high = lost[r.id][1], lost[r.id][2]
  for _, c in ipairs(copies_of(r)) do
    local holder = current(c[1], c[2])
    if holder and (name == '' or name == holder.name) then uncopy(r, holder, low - 1) end
  end
  local home = current(r.node, r.epoch)
  if home and (name == '' or name == home.name) then
    count('blocks_lost', high - low + 1)
    if low - 1 > r.start then
      local _, lower = split(r, low - 1)
      r = lower
    end
    if high < r.stop then r = split(r, high) end
    local blocks = r.stop - r.start
    home.stored = home.stored - blocks * r.bb
    home.blocks = home.blocks - blocks
    for depth = r.stop, r.start + 1, -1 do bury(home, r.ns, hash_at(r, depth), r.bb, r.ranks) end
    leave(r)
    r.node, r.epoch, r.dirty = 0, 0, true
    call('ZADD', K .. 'pr:0:0', now + C_DEAD_GRACE_MS, r.id)
    call('ZADD', K .. 'dead', 0, '0000:00000000')
    settle(r)
  end
end
return done({})
