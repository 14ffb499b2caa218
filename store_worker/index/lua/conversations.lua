-- What is remembered of turns, as in sessions.py.
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
