-- Sessions, their holds, and what is remembered of turns, as in sessions.py.
local function stale(key, token)
  if key == '' then return false end
  local s = session_of(key)
  return token < (s and s.gen or M.floor)
end

local function open_session(key, token, tenant)
  local s = session_of(key)
  if not s then
    M.seq = M.seq + 1
    M.gen = max(M.gen, token)
    s = {key = key, gen = token, seq = M.seq, home = 0, turns = 0, last = now, prio = 0,
         puntil = 0, pin = 0, pinb = 0, tenant = '', engines = '', counted = 0, closed = 0,
         bseq = 0, holds = {}, nholds = 0}
    S[key] = s
    call('ZADD', K .. 'sq', s.seq, key)
    call('ZADD', K .. 'si', now, key)
  end
  if s.counted == 0 then
    s.counted, s.tenant = 1, tenant
    call('HINCRBY', K .. 'tn', 's:' .. tenant, 1)
  end
  s.dirty = true
  return s
end

local function unpin(s)
  call('ZREM', K .. 'sp', s.key)
  if s.pinb ~= 0 then call('HINCRBY', K .. 'tn', 'p:' .. s.tenant, num(-s.pinb)) end
  s.pin, s.pinb, s.dirty = 0, 0, true
end

local function uncount(s)
  unpin(s)
  if s.counted == 1 then
    s.counted = 0
    call('HINCRBY', K .. 'tn', 's:' .. s.tenant, -1)
  end
end

local function session_bytes(s)
  local total, seen, n = 0, {}, 0
  for _, id in ipairs(call('ZRANGE', K .. 'sh:' .. s.key, 0, -1)) do
    local r = run_of(id)
    local depth = r.stop
    while r and not seen[r.id] and n < C_PATH_RUNS_MAX do
      seen[r.id] = true
      n = n + 1
      total = total + (depth - r.start) * r.bb
      if r.parent ~= '' then r, depth = find(r.ns, r.parent) else r = nil end
    end
  end
  return total
end

local function settle_held(s)
  for _, id in ipairs(call('ZRANGE', K .. 'sh:' .. s.key, 0, -1)) do settle(run_of(id)) end
end

local function charge_pin(s, limit)
  local bytes = session_bytes(s)
  local pinned = tonumber(call('HGET', K .. 'tn', 'p:' .. s.tenant) or 0)
  if pinned - s.pinb + bytes > limit then return false end
  call('HINCRBY', K .. 'tn', 'p:' .. s.tenant, num(bytes - s.pinb))
  s.pinb, s.dirty = bytes, true
  return true
end

local function repin(s, limit)
  if not charge_pin(s, limit) then
    unpin(s)
    count('pins_ended')
    settle_held(s)
  end
end

local function used_by(s, engine)
  s.last, s.dirty = now, true
  if engine ~= '' and string.match(s.engines, '^[^\n]*') ~= engine then
    local names = {engine}
    for name in string.gmatch(s.engines, '[^\n]+') do
      if name ~= engine and #names < C_ENGINES_MAX then names[#names + 1] = name end
    end
    s.engines = concat(names, '\n')
  end
  holds_of(s)
  if s.nholds == 0 then call('ZADD', K .. 'si', now, s.key) end
end

local function tidy()
  for _, key in ipairs(call('ZRANGEBYSCORE', K .. 'sp', '-inf', now, 'LIMIT', 0, 2)) do
    unpin(session_of(key))
  end
  for _ = 1, 2 do
    local first = call('ZRANGE', K .. 'si', 0, 0, 'WITHSCORES')
    if not first[1] then break end
    if tonumber(first[2]) > now - C_SESSION_KEPT_MS
      and call('ZCARD', K .. 'si') <= C_SESSIONS_KEPT_MAX then break end
    local s = session_of(first[1])
    uncount(s)
    if s.closed == 1 then M.floor = max(M.floor, s.gen) end
    call('ZREM', K .. 'si', s.key)
    call('ZREM', K .. 'sq', s.key)
    call('DEL', K .. 's:' .. s.key, K .. 'sb:' .. s.key)
    S[s.key] = false
  end
  local over = call('ZCARD', K .. 'cu') - C_TURNS_KEPT_MAX
  for _ = 1, min(2, over) do
    local key = call('ZRANGE', K .. 'cu', 0, 0)[1]
    call('ZREM', K .. 'cu', key)
    call('HDEL', K .. 'cv', key)
  end
end

-- holds ---------------------------------------------------------------------------------------
local function drop_hold(key, r)
  call('ZREM', K .. 'h:' .. r.id, key)
  local s = session_of(key)
  if s then
    cut_hold(s, r.id)
    set_idle(s)
  end
end

-- how deep the session holds the run; 0 if it does not
local function held_at(r, key)
  return min(tonumber(call('ZSCORE', K .. 'h:' .. r.id, key) or 0), r.stop)
end

local function hold(key, path)
  local r, depth = path[1][1], path[1][2]
  local s = session_of(key)
  if not s then
    if path[2] then
      local at = call('ZSCORE', K .. 'h:' .. path[2][1].id, key)
      if at and tonumber(at) == path[2][2] then call('ZREM', K .. 'h:' .. path[2][1].id, key) end
    end
  else
    local holds = holds_of(s)
    for i = 2, #path do
      local upper = path[i][1]
      if holds[upper.id] and held_at(upper, key) <= path[i][2] then drop_hold(key, upper) end
    end
  end
  local list = K .. 'h:' .. r.id
  local old = call('ZSCORE', list, key)
  if not old and call('ZCARD', list) >= C_HOLDERS_MAX then
    drop_hold(call('ZRANGE', list, 0, 0)[1], r)
  end
  call('ZADD', list, max(depth, min(tonumber(old or 0), r.stop)), key)
  if s then
    put_hold(s, r.id, now)
    call('ZREM', K .. 'si', key)
    if s.nholds > C_HOLDS_MAX then
      local other = run_of(call('ZRANGE', K .. 'sh:' .. key, 0, 0)[1])
      drop_hold(key, other)
      settle(other)
    end
  end
end

-- turns ---------------------------------------------------------------------------------------
-- first block below the shared part ('': wholly shared), depth of the shared part
local function first_private(path, beyond)
  local below
  for _, step in ipairs(path) do
    local r, depth, shared = step[1], step[2], 0
    for _, d in ipairs(shared_of(r)) do
      if d <= depth and d > shared then shared = d end
    end
    if shared > 0 and shared < depth then return hash_at(r, shared + 1), shared end
    if shared > 0 then return below and hash_at(below, below.start + 1) or beyond, shared end
    below = r
  end
  return below and hash_at(below, below.start + 1) or beyond, 0
end

local function class_of(times, tokens)
  local text = call('HMGET', K .. 'tb', 'times', 'tokens')
  if not text[1] then text = {C_TIMES, C_TOKENS} end
  local parts = {}
  for i, value in ipairs({times, tokens}) do
    local k, n = 0, 0
    for edge in string.gmatch(text[i], '%d+') do
      n = n + 1
      if tonumber(edge) <= value then k = n end
    end
    parts[i], parts[i + 2] = max(0, k - 1), n
  end
  return parts[1] * parts[4] + parts[2]
end

-- {turns, at, cls, depth, shared, tip}
local function conversation_of(ns, private)
  local text = private ~= '' and call('HGET', K .. 'cv', ns .. private)
  if not text then return nil end
  local turns, at, cls, depth, shared, tip =
    string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+)|(.*)$')
  return {turns = tonumber(turns), at = tonumber(at), cls = tonumber(cls),
          depth = tonumber(depth), shared = tonumber(shared), tip = tip}
end

local function class_now(ns, private, tokens)
  if private == '' then return class_of(C_TIMES_SHARED, tokens) end
  local known = conversation_of(ns, private)
  return class_of(known and known.turns + 1 or 1, tokens)
end

local function log(text)
  call('RPUSH', K .. 'log', text)
  call('LTRIM', K .. 'log', -C_LOG_MAX, -1)
  M.logged = M.logged + 1
end

-- the share of the last turn's private blocks that this turn has again, in thousandths
local function kept_of(ns, known, path, depth)
  local had = known.depth - known.shared
  if had <= 0 then return 1000 end
  local common = min(depth, known.depth)
  if known.tip ~= '' then
    local r, at = find(ns, known.tip)
    if r then
      local here, tip = {}, at
      for _, step in ipairs(path) do here[step[1].id] = step[2] end
      while not here[r.id] and r.parent ~= '' do
        at = r.start
        r = find(ns, r.parent)
      end
      local branch = min(at, here[r.id] or 0)
      if branch < tip then common = min(common, branch) end
    end
  end
  return min(1000, floor(max(0, common - known.shared) * 1000 / had))
end

-- turn: {tokens, depth1, hash1, ...}; the class of the turn
local function end_turn(ns, path, private, shared, turn)
  local cls = class_now(ns, private, turn.tokens)
  if private == '' then return cls end
  local known = conversation_of(ns, private)
  local depth, tip = 0, ''
  if path[1] then depth, tip = path[1][2], hash_at(path[1][1], path[1][2]) end
  for i = 1, #turn, 2 do depth = max(depth, turn[i]) end
  if known then
    log(fmt('T %.0f %d %d %.0f %d', now, cls, known.cls, now - known.at,
      kept_of(ns, known, path, depth)))
  else
    log(fmt('T %.0f %d -1 0 1000', now, cls))
  end
  call('HSET', K .. 'cv', ns .. private, fmt('%d %.0f %d %d %d|',
    known and known.turns + 1 or 1, now, cls, depth, shared) .. tip)
  call('ZADD', K .. 'cu', now, ns .. private)
  return cls
end

local function end_conversation(r, depth)
  local path = walk(r, depth)
  local private = path and first_private(path, '') or ''
  local known = conversation_of(r.ns, private)
  if known then
    call('HDEL', K .. 'cv', r.ns .. private)
    call('ZREM', K .. 'cu', r.ns .. private)
    log(fmt('E %d %.0f', known.cls, known.at))
  end
end

-- boundaries: hash sb:<session>, per namespace "seq|" and records of depth, length and hash
local function remember(s, ns, turn)
  local own, front = {}, {}
  for i = 1, #turn, 2 do
    if not own[turn[i]] then front[#front + 1] = turn[i] end
    own[turn[i]] = turn[i + 1]
  end
  table.sort(front, function(a, b) return a > b end)
  local parts = {}
  for _, depth in ipairs(front) do
    parts[#parts + 1] = fmt('%d %d:', depth, #own[depth]) .. own[depth]
  end
  local list = K .. 'sb:' .. s.key
  local old = call('HGET', list, ns) or '0|'
  local at = string.match(old, '^%d+|()')
  while at <= #old and #parts < C_BOUNDARIES_MAX do
    local depth, size, from = string.match(old, '^(%d+) (%d+):()', at)
    size = tonumber(size)
    if not own[tonumber(depth)] then parts[#parts + 1] = sub(old, at, from + size - 1) end
    at = from + size
  end
  s.bseq, s.dirty = s.bseq + 1, true
  for i = #parts, C_BOUNDARIES_MAX + 1, -1 do parts[i] = nil end
  call('HSET', list, ns, fmt('%d|', s.bseq) .. concat(parts))
  if call('HLEN', list) > C_NAMESPACES_MAX then
    local oldest, which = INF, nil
    local all = call('HGETALL', list)
    for i = 1, #all, 2 do
      local seq = tonumber(string.match(all[i + 1], '^%d+'))
      if seq < oldest then oldest, which = seq, all[i] end
    end
    call('HDEL', list, which)
  end
end
