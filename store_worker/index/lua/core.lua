-- Records and their caches: what a script reads once it keeps, what it changed `flush` writes.
-- Constants (C_...) are put in front by the loader. ARGV[1] is the time in ms, 0 for the server's.
local K, call, fmt = '{skv}:', redis.call, string.format
local floor, max, min, sub = math.floor, math.max, math.min, string.sub
local concat = table.concat
local INF = math.huge
local function num(n) return fmt('%.0f', n) end
local function id12(n) return fmt('%012.0f', n) end

-- calls a command with a long list of arguments in pieces that fit the stack
local function each(name, key, list)
  local n = #list
  for i = 1, n, 1000 do call(name, key, unpack(list, i, min(i + 999, n))) end
end

local M, WAS = {}, {}
local META = {'clock', 'gen', 'floor', 'seq', 'run', 'grant', 'nodes', 'logged', 'running', 'tcls', 'ops'}
local now
local function begin()
  local got = call('HMGET', K .. 'm', unpack(META))
  for i = 1, #META do
    M[META[i]] = tonumber(got[i] or 0)
    WAS[META[i]] = M[META[i]]
  end
  now = tonumber(ARGV[1])
  if now == 0 then
    local t = call('TIME')
    now = t[1] * 1000 + floor(t[2] / 1000)
  end
  now = max(now, M.clock)
  M.clock, M.ops = now, M.ops + 1
end

local counts = {}
local function count(name, n) counts[name] = (counts[name] or 0) + (n or 1) end

-- victims: flat, four values each
local VICTIMS = {}
local function victim(ns, block, name, ranks)
  local n = #VICTIMS
  VICTIMS[n + 1], VICTIMS[n + 2], VICTIMS[n + 3], VICTIMS[n + 4] = ns, block, name, ranks
end

-- nodes ---------------------------------------------------------------------------------------
local N, NF = {}, {'epoch', 'up', 'drain', 'cap', 'stored', 'copies', 'granted', 'dying',
                   'blocks', 'rm', 'rn', 'rb'}
local function node_at(idx)
  local node = N[idx]
  if node then return node end
  local got = call('HMGET', K .. 'n:' .. idx, 'name', 'inc', unpack(NF))
  node = {idx = idx, name = got[1], inc = got[2]}
  for i = 1, #NF do node[NF[i]] = tonumber(got[i + 2]) end
  node.place = idx .. ':' .. node.epoch
  N[idx] = node
  return node
end

local function node_named(name)
  local idx = call('HGET', K .. 'nodes', name)
  return idx and node_at(tonumber(idx))
end

-- the node, if this is its present incarnation
local function current(idx, epoch)
  if idx == 0 then return nil end
  local node = node_at(idx)
  if node.epoch == epoch then return node end
end

local function reachable(idx, epoch)
  local node = current(idx, epoch)
  return node and node.up == 1
end

local function used(node) return node.stored + node.copies + node.granted + node.dying end

-- runs ----------------------------------------------------------------------------------------
local R = {}
-- A walk needs the first part only; the rest is parsed when one of its fields is asked for.
local FRONT = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+);([^;]*);([^|]*)|()'
local REST = '^(%d+) (%d+) (%d) (%S+) (%d);([^;]*);([^;]*)$'
local LAZY = {ranks = 1, bb = 1, free = 1, where = 1, timer = 1, tmarks = 1, tleases = 1}
local META_RUN = {__index = function(r, field)
  if not LAZY[field] then return nil end
  local text = rawget(r, 'text')
  if not text then return nil end
  local ranks, bb, free, where, timer, marks, leases = string.match(text, REST, r.at)
  for name, value in pairs({ranks = ranks + 0, bb = bb + 0, free = free == '1',
    where = where ~= '-' and where, timer = timer == '1', tmarks = marks, tleases = leases}) do
    if rawget(r, name) == nil then r[name] = value end
  end
  r.text = nil
  return rawget(r, field)
end}

local function run_of(id)
  local r = R[id]
  if r then return r end
  local text = call('GET', K .. 'r:' .. id)
  local start, stop, node, epoch, nslen, plen, copies, shared, at = string.match(text, FRONT)
  local mid = at + nslen
  local rest = mid + plen
  r = setmetatable({
    id = id, start = start + 0, stop = stop + 0, node = node + 0, epoch = epoch + 0,
    tcopies = copies, tshared = shared, ns = sub(text, at, mid - 1),
    parent = sub(text, mid, rest - 1), text = text, at = rest
  }, META_RUN)
  if copies == '' then r.copies = {} end
  if shared == '' then r.shared = {} end
  R[id] = r
  return r
end

local function triples(text)
  local list = {}
  for a, b, c in string.gmatch(text, '(%d+) (%d+) (%d+)') do
    list[#list + 1] = {tonumber(a), tonumber(b), tonumber(c)}
  end
  return list
end

local function untriples(list)
  local parts = {}
  for i, m in ipairs(list) do parts[i] = num(m[1]) .. ' ' .. num(m[2]) .. ' ' .. num(m[3]) end
  return concat(parts, ',')
end

-- marks: {depth, at, class}; leases: {depth, until, 0}; copies: {node, epoch, upto}
local function marks_of(r) if not r.marks then r.marks = triples(r.tmarks) end return r.marks end
local function leases_of(r) if not r.leases then r.leases = triples(r.tleases) end return r.leases end
local function copies_of(r) if not r.copies then r.copies = triples(r.tcopies) end return r.copies end
local function shared_of(r)
  if not r.shared then
    r.shared = {}
    for d in string.gmatch(r.tshared, '%d+') do r.shared[#r.shared + 1] = tonumber(d) end
  end
  return r.shared
end

local function write_run(r)
  if r.gone then
    call('DEL', K .. 'r:' .. r.id, K .. 'b:' .. r.id, K .. 'k:' .. r.id, K .. 'h:' .. r.id)
    return
  end
  if r.marks then r.tmarks = untriples(r.marks) end
  if r.leases then r.tleases = untriples(r.leases) end
  if r.copies then r.tcopies = untriples(r.copies) end
  if r.shared then r.tshared = concat(r.shared, ' ') end
  -- joined, not formatted: %s ends at a zero byte
  call('SET', K .. 'r:' .. r.id, concat({
    fmt('%d %d %d %d %d %d;', r.start, r.stop, r.node, r.epoch, #r.ns, #r.parent), r.tcopies, ';',
    r.tshared, '|', r.ns, r.parent, fmt('%d %.0f %d %s %d;', r.ranks, r.bb, r.free and 1 or 0,
    r.where or '-', r.timer and 1 or 0), r.tmarks, ';', r.tleases}))
  if r.newb then call('SET', K .. 'b:' .. r.id, r.b) end
end

local function hashes_of(r)
  if not r.b then r.b = call('GET', K .. 'b:' .. r.id) end
  return r.b, #r.b / (r.stop - r.start)
end

local function hash_at(r, depth)
  local b, size = hashes_of(r)
  return sub(b, (depth - r.start - 1) * size + 1, (depth - r.start) * size)
end

local function entry_of(text)
  if text then return run_of(sub(text, 1, 12)), tonumber(sub(text, 13)) end
end

-- run and depth of a listed block, nil if it is not listed
local function find(ns, block)
  return entry_of(call('HGET', K .. 'e:' .. ns, block))
end

-- the deepest depth that something hangs from; start if nothing does
local function top_child(r)
  if not r.top then
    local got = call('ZREVRANGE', K .. 'k:' .. r.id, 0, 0, 'WITHSCORES')
    r.top = got[2] and floor(tonumber(got[2])) or r.start
    r.topid = got[1]
  end
  return r.top
end

local function add_child(r, id, depth)
  call('ZADD', K .. 'k:' .. r.id, depth, id)
  r.top = nil
end

local function drop_child(r, id)
  r.top = nil
  return call('ZREM', K .. 'k:' .. r.id, id) == 1
end

local function top_holder(r)
  local got = call('ZREVRANGE', K .. 'h:' .. r.id, 0, 0, 'WITHSCORES')
  return got[2] and min(tonumber(got[2]), r.stop) or r.start
end

-- nobody wants the block at this depth, where the run ends or will
local function unwanted(r, depth)
  return depth > r.start and top_holder(r) < depth
    and call('ZCOUNT', K .. 'k:' .. r.id, depth, depth) == 0
end

-- sessions ------------------------------------------------------------------------------------
local S, SF = {}, {'gen', 'seq', 'home', 'turns', 'last', 'prio', 'puntil', 'pin', 'pinb',
                   'counted', 'closed', 'bseq'}
local function session_of(key)
  local s = S[key]
  if s ~= nil then return s end
  s = false
  if key ~= '' then
    local got = call('HMGET', K .. 's:' .. key, 'tenant', 'engines', unpack(SF))
    if got[3] then
      s = {key = key, tenant = got[1], engines = got[2]}
      for i = 1, #SF do s[SF[i]] = tonumber(got[i + 2]) end
    end
  end
  S[key] = s
  return s
end

-- the session's holds: run id -> time
local function holds_of(s)
  if not s.holds then
    s.holds, s.nholds = {}, 0
    local got = call('ZRANGE', K .. 'sh:' .. s.key, 0, -1, 'WITHSCORES')
    for i = 1, #got, 2 do
      s.holds[got[i]] = tonumber(got[i + 1])
      s.nholds = s.nholds + 1
    end
  end
  return s.holds
end

local function put_hold(s, id, at)
  local holds = holds_of(s)
  if not holds[id] then s.nholds = s.nholds + 1 end
  holds[id] = at
  call('ZADD', K .. 'sh:' .. s.key, at, id)
end

local function cut_hold(s, id)
  local holds = holds_of(s)
  if holds[id] then
    holds[id] = nil
    s.nholds = s.nholds - 1
    call('ZREM', K .. 'sh:' .. s.key, id)
  end
end

-- what dies is written in one go
local BURIED = {}
local function bury(node, ns, block, bytes, ranks)
  local list = BURIED[node.idx]
  if not list then
    list = {{}, {}}
    BURIED[node.idx] = list
  end
  local h, z = list[1], list[2]
  local key = ns .. block
  h[#h + 1] = key
  h[#h + 1] = num(bytes) .. ' ' .. ranks .. ' ' .. #ns
  z[#z + 1] = now
  z[#z + 1] = key
  node.dying = node.dying + bytes
  node.dirty = true
  victim(ns, block, node.name, ranks)
end

local function flush_buried()
  for idx, list in pairs(BURIED) do
    each('HSET', K .. 'dy:' .. N[idx].place, list[1])
    each('ZADD', K .. 'do:' .. N[idx].place, list[2])
  end
  BURIED = {}
end

-- key of the dying blocks of a node; what this call has buried is in it
local function dying_key(node)
  flush_buried()
  return K .. 'dy:' .. node.place
end

local function flush()
  flush_buried()
  for _, r in pairs(R) do if r.dirty then write_run(r) end end
  for idx, node in pairs(N) do
    if node.dirty then
      local args = {}
      for _, f in ipairs(NF) do
        args[#args + 1] = f
        args[#args + 1] = num(node[f])
      end
      call('HSET', K .. 'n:' .. idx, unpack(args))
    end
  end
  for key, s in pairs(S) do
    if s and s.dirty then
      local args = {'tenant', s.tenant, 'engines', s.engines}
      for _, f in ipairs(SF) do
        args[#args + 1] = f
        args[#args + 1] = num(s[f])
      end
      call('HSET', K .. 's:' .. key, unpack(args))
    end
  end
  for name, n in pairs(counts) do
    if n ~= 0 then call('HINCRBY', K .. 'ct', name, n) end
  end
  local args = {}
  for _, f in ipairs(META) do
    if M[f] ~= WAS[f] then
      args[#args + 1] = f
      args[#args + 1] = num(M[f])
    end
  end
  call('HSET', K .. 'm', unpack(args))
end

-- ends every script that writes: the reply is what is given, followed by the victims
local function done(reply)
  flush()
  local n = #reply
  for i = 1, #VICTIMS do reply[n + i] = VICTIMS[i] end
  return reply
end
