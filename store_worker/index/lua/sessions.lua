-- Sessions and their holds, as in sessions.py.
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
