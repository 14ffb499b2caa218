-- ARGV: now, namespace, session, generation, parent, start, object bytes, ranks, grant ms,
--   new tokens, must, high water, tenant, sessions max, engine, number of nodes, nodes..., hashes...
-- -> 'G', grant, node, incarnation, first missing, end; or 'D', reason; then victims
begin()
local Q = {
  ns = ARGV[2], session = ARGV[3], token = tonumber(ARGV[4]), parent = ARGV[5],
  start = tonumber(ARGV[6]), object_bytes = ARGV[7], ranks = tonumber(ARGV[8]),
  grant_ms = tonumber(ARGV[9]), tokens = tonumber(ARGV[10]), must = ARGV[11] == '1',
  high = tonumber(ARGV[12]), tenant = ARGV[13], sessions_max = tonumber(ARGV[14]),
  engine = ARGV[15], nodes = tonumber(ARGV[16])
}
local FIRST = 17 + Q.nodes
local HASHES = #ARGV - FIRST + 1

local function decline(reason)
  count('declined_' .. reason)
  return done({'D', reason})
end

-- path of the last listed block, how many hashes are listed; nil: the chain is broken
local function wanted()
  local path = {}
  local keys = {Q.parent}
  for i = 1, HASHES do keys[i + 1] = ARGV[FIRST + i - 1] end
  local got = call('HMGET', K .. 'e:' .. Q.ns, unpack(keys))
  if Q.parent ~= '' then
    if not got[1] then return nil end
    path = walk(entry_of(got[1]))
    if not path then return nil end
    for _, step in ipairs(path) do
      if live_stop(step[1]) < step[2] then return nil end
    end
  end
  local first, runs = 0, {}
  for i = 1, HASHES do
    local r, depth = entry_of(got[i + 1])
    if not r or live_stop(r) < depth then break end
    if #runs > 0 and runs[#runs][1] == r then
      runs[#runs][2] = depth
    elseif #runs == 0 and path[1] and path[1][1] == r then
      path[1][2] = depth
    else
      runs[#runs + 1] = {r, depth}
    end
    first = i
  end
  if #runs == 0 then return path, first end
  local whole = {}
  for i = #runs, 1, -1 do whole[#whole + 1] = runs[i] end
  for _, step in ipairs(path) do whole[#whole + 1] = step end
  return whole, first
end

local function node_of(step)
  local r, depth = step[1], step[2]
  if reachable(r.node, r.epoch) then return node_at(r.node) end
  for _, c in ipairs(copies_of(r)) do
    if c[3] >= depth and reachable(c[1], c[2]) then return node_at(c[1]) end
  end
end

-- what a save costs there: what its next victim is worth, then how busy the node is
local function price(node, missing)
  local need = block_bytes(node, Q.object_bytes, Q.ranks) * missing
  local busy = recent_bytes(node)
  if node.cap == 0 or used(node) + need <= node.cap then return {0, 0, 0, 0, busy} end
  wake(node)
  local worth = worst(node)
  if not worth then return {1, C_LEVEL_PINNED + 1, 0, 0, busy} end
  return {1, worth[1], worth[2], worth[3], busy}
end

local function choose(missing)
  local able = {}
  for i = 1, Q.nodes do
    local node = node_named(ARGV[16 + i])
    if node and node.up == 1 and node.drain == 0 then able[#able + 1] = node end
  end
  if Q.nodes == 1 then return able end
  local s = session_of(Q.session)
  local home = s and s.home ~= 0 and node_at(s.home)
  if home and home.up == 1 and home.drain == 0 then
    local order = {home}
    for _, node in ipairs(able) do if node ~= home then order[#order + 1] = node end end
    return order
  end
  if #able > 1 then
    local prices = {}
    for i, node in ipairs(able) do prices[node] = {price(node, missing), i} end
    table.sort(able, function(a, b)
      local p, q = prices[a], prices[b]
      if less(p[1], q[1]) then return true end
      return not less(q[1], p[1]) and p[2] < q[2]
    end)
  end
  return able
end

local function own_score(path, first)
  if Q.must then return nil end
  local private = first_private(path, ARGV[FIRST + first])
  return score_of(class_now(Q.ns, private, Q.tokens), 0)
end

-- nil if there is room for the save now, else why not
local function make_room(node, path, first)
  local bb = block_bytes(node, Q.object_bytes, Q.ranks)
  local missing = HASHES - first
  local need = bb * missing
  local keep, keepdepth
  if path[1] then keep, keepdepth = path[1][1].id, path[1][2] end
  if node.cap == 0 then
    local over = node.blocks + missing - C_UNACCOUNTED_BLOCKS_MAX
    if over > 0 then
      wake(node)
      evict(node, over * bb, nil, keep, keepdepth)
    end
    return nil
  end
  if need > node.cap then return 'full' end
  local high = floor(node.cap * Q.high)
  local over = used(node) + need - high - node.dying
  if used(node) + need > high then
    wake(node)
    if over > 0 then over = over - drop_copies(node, over, C_COPY_IDLE_MS) end
    if over > 0 and not evict(node, over, own_score(path, first), keep, keepdepth) then
      return 'not_worth'
    end
  end
  if used(node) + need <= node.cap then return nil end
  if node.dying == 0 then drop_copies(node, over, 0) end
  return node.dying > 0 and 'room' or 'full'
end

local function settle_down(s, node)
  local home = s.home ~= 0 and node_at(s.home)
  if not home or Q.nodes ~= 1 or home.up == 0 then
    s.home, s.dirty = node.idx, true
  end
end

local function grant(node, path, first)
  if Q.session ~= '' then
    local s = open_session(Q.session, Q.token, Q.tenant)
    used_by(s, Q.engine)
    if first < HASHES then settle_down(s, node) end
  end
  M.grant = M.grant + 1
  M.running = M.running + 1
  local id, expires = id12(M.grant), now + min(Q.grant_ms, C_GRANT_TTL_MAX_S * 1000)
  local hashes = {unpack(ARGV, FIRST + first)}
  local before = first > 0 and ARGV[FIRST + first - 1] or Q.parent
  local bb = block_bytes(node, Q.object_bytes, Q.ranks)
  call('HSET', K .. 'g:' .. id, 'ns', Q.ns, 'session', Q.session, 'gen', num(Q.token),
    'parent', before, 'start', num(Q.start + first), 'hashes', concat(hashes), 'n', #hashes,
    'node', node.idx, 'epoch', node.epoch, 'ranks', Q.ranks, 'bb', num(bb), 'tokens', Q.tokens)
  call('ZADD', K .. 'gx', expires, id)
  promise(node, Q.ns, hashes, bb)
  if path[1] then
    add_child(path[1][1], 'g' .. id, path[1][2] + 0.5)
    settle(path[1][1])
  end
  count('granted')
  reissue(node, C_BLOCKS_MAX / 4)
  return done({'G', M.grant, node.name, node.inc, first, expires})
end

expire()
tidy()
if stale(Q.session, Q.token) then return decline('stale_generation') end
if Q.session ~= '' and Q.sessions_max > 0 then
  local s = session_of(Q.session)
  if not (s and s.counted == 1)
    and tonumber(call('HGET', K .. 'tn', 's:' .. Q.tenant) or 0) >= Q.sessions_max then
    return decline('quota')
  end
end
local path, first = wanted()
if not path then return decline('missing_parent') end
if #path >= C_PATH_RUNS_MAX then return decline('full') end
if first == HASHES then return grant(node_of(path[1]), path, first) end
local nodes = choose(HASHES - first)
if #nodes == 0 then return decline('no_node') end
local keys = {}
for i = first, HASHES - 1 do keys[#keys + 1] = Q.ns .. ARGV[FIRST + i] end
local reason, node
for _, candidate in ipairs(nodes) do
  node = candidate
  reason = nil
  local dying = call('HMGET', dying_key(node), unpack(keys))
  for i = 1, #keys do
    if dying[i] then reason = 'dying' end
  end
  if not reason then
    reason = make_room(node, path, first)
    if not reason then return grant(node, path, first) end
  end
  if reason ~= 'full' then break end
end
if Q.session ~= '' and reason == 'room' then
  settle_down(open_session(Q.session, Q.token, Q.tenant), node)
end
reissue(node, C_BLOCKS_MAX / 4)
return decline(reason)
