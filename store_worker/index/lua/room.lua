-- Room on the nodes, as in room.py.
local function block_bytes(node, object_bytes, ranks)
  local charged = call('HGET', K .. 'nc:' .. node.idx, object_bytes)
  return tonumber(charged or object_bytes) * ranks
end

-- promises ------------------------------------------------------------------------------------
local function promise(node, ns, hashes, bb)
  local need = bb * #hashes
  node.granted = node.granted + need
  if #hashes > 0 then
    local keys, args = {}, {}
    for i, block in ipairs(hashes) do keys[i] = ns .. block end
    local others = call('HMGET', K .. 'gh:' .. node.place, unpack(keys))
    for i, key in ipairs(keys) do args[2 * i - 1], args[2 * i] = key, (others[i] or 0) + 1 end
    call('HSET', K .. 'gh:' .. node.place, unpack(args))
  end
  local minute = floor(now / 60000)
  if node.rm == minute then
    node.rn = node.rn + need
  else
    node.rb = node.rm == minute - 1 and node.rn or 0
    node.rm, node.rn = minute, need
  end
  node.dirty = true
end

local function recent_bytes(node)
  local minute = floor(now / 60000)
  local now_bytes, before = node.rn, node.rb
  if node.rm ~= minute then
    before = node.rm == minute - 1 and node.rn or 0
    now_bytes = 0
  end
  return now_bytes * 60000 + before * (60000 - now % 60000)
end

-- grants: hash g:<id>; the hashes that were granted are one string
local GF = {'ns', 'session', 'gen', 'parent', 'start', 'hashes', 'n', 'node', 'epoch', 'ranks',
            'bb', 'tokens', 'reply'}
local GN = {gen = 1, start = 1, n = 1, node = 1, epoch = 1, ranks = 1, bb = 1, tokens = 1}
local function grant_of(id)
  local got = call('HMGET', K .. 'g:' .. id, unpack(GF))
  if not got[1] then return nil end
  local g = {id = id}
  for i, f in ipairs(GF) do
    if GN[f] then g[f] = tonumber(got[i]) else g[f] = got[i] end
  end
  g.list = {}
  if g.n > 0 and g.hashes then
    local size = #g.hashes / g.n
    for i = 1, g.n do g.list[i] = sub(g.hashes, (i - 1) * size + 1, i * size) end
  end
  return g
end

-- buries a block that is not listed; another grant's end may have buried it before
local function bury_again(node, ns, block, bytes, ranks, dying)
  if dying then
    victim(ns, block, node.name, ranks)
  else
    bury(node, ns, block, bytes, ranks)
  end
end

local function settle_promise(g)
  local node = current(g.node, g.epoch)
  if g.parent ~= '' then
    local parent = find(g.ns, g.parent)
    if parent and drop_child(parent, 'g' .. g.id) then settle(parent) end
  end
  M.running = M.running - 1
  if not node then return end
  node.granted = node.granted - g.bb * g.n
  node.dirty = true
  if g.n == 0 then return end
  local keys, mine, gone, left = {}, {}, {}, {}
  for i, block in ipairs(g.list) do keys[i] = g.ns .. block end
  local counted = call('HMGET', K .. 'gh:' .. node.place, unpack(keys))
  for i = 1, g.n do
    local others = counted[i] - 1
    if others > 0 then
      left[#left + 1] = keys[i]
      left[#left + 1] = others
    else
      gone[#gone + 1] = keys[i]
      mine[#mine + 1] = g.list[i]
    end
  end
  each('HSET', K .. 'gh:' .. node.place, left)
  if #gone == 0 then return end
  call('HDEL', K .. 'gh:' .. node.place, unpack(gone))
  local entries = call('HMGET', K .. 'e:' .. g.ns, unpack(mine))
  local unlisted, dead, copied = {}, {}, {}
  for i, block in ipairs(mine) do
    local r, depth = entry_of(entries[i])
    if not r or not lies_on(r, depth, node) then
      unlisted[#unlisted + 1] = block
      dead[#dead + 1] = gone[i]
      copied[#copied + 1] = fmt('%04d', node.idx) .. gone[i]
    end
  end
  if #unlisted == 0 then return end
  local dying = call('HMGET', dying_key(node), unpack(dead))
  local copying = call('HMGET', K .. 'cy', unpack(copied))
  for i, block in ipairs(unlisted) do
    if not copying[i] then bury_again(node, g.ns, block, g.bb, g.ranks, dying[i]) end
  end
end

local function end_copying(member)
  local text = call('HGET', K .. 'cy', member)
  call('ZREM', K .. 'cx', member)
  if not text then return false end
  call('HDEL', K .. 'cy', member)
  local bytes, ranks, epoch, nslen = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
  local node = current(tonumber(sub(member, 1, 4)), tonumber(epoch))
  if not node then return false end
  local ns, block = sub(member, 5, 4 + nslen), sub(member, 5 + nslen)
  node.granted = node.granted - bytes
  node.dirty = true
  local r, depth = find(ns, block)
  if not (r and lies_on(r, depth, node))
    and call('HEXISTS', K .. 'gh:' .. node.place, ns .. block) == 0 then
    local dying = call('HEXISTS', dying_key(node), ns .. block) == 1
    bury_again(node, ns, block, tonumber(bytes), tonumber(ranks), dying)
  end
  return true
end

local function expire()
  for _, id in ipairs(call('ZRANGEBYSCORE', K .. 'gx', '-inf', now, 'LIMIT', 0,
    C_EXPIRE_PER_CALL)) do
    local g = grant_of(id)
    call('DEL', K .. 'g:' .. id)
    call('ZREM', K .. 'gx', id)
    if not g.reply then
      settle_promise(g)
      count('grants_expired')
    end
  end
  for _, member in ipairs(call('ZRANGEBYSCORE', K .. 'cx', '-inf', now, 'LIMIT', 0,
    C_EXPIRE_PER_CALL)) do end_copying(member) end
end

-- victims -------------------------------------------------------------------------------------
local EDGES, SCORES = nil, {}
local function score_of(cls, idle)
  if not EDGES then
    EDGES = {}
    for n in string.gmatch(call('HGET', K .. 'tb', 'edges') or '0', '%d+') do
      EDGES[#EDGES + 1] = tonumber(n)
    end
  end
  local low, high = 1, #EDGES + 1
  while low < high do
    local mid = floor((low + high) / 2)
    if idle < EDGES[mid] then high = mid else low = mid + 1 end
  end
  local at = cls * #EDGES + max(0, low - 2)
  local score = SCORES[at]
  if not score then
    local text = call('GETRANGE', K .. 'ts', at * 25, at * 25 + 24)
    score = text ~= '' and tonumber(text) or 0
    SCORES[at] = score
  end
  return score
end

-- a < b, as tuples
local function less(a, b)
  for i = 1, #a do
    if a[i] ~= b[i] then return a[i] < b[i] end
  end
  return false
end

local function end_of(list, back, skip)
  local ends = ENDS[list]
  if not ends then
    ends = {}
    ENDS[list] = ends
  end
  local got = ends[back]
  if not got then
    got = call(back and 'ZREVRANGE' or 'ZRANGE', list, 0, 1, 'WITHSCORES')
    ends[back] = got
  end
  if got[1] and got[1] == skip then return got[3], got[4] end
  return got[1], got[2]
end

-- {level, score, at, run} of the leaf that is worth least
local function worst(node, skip)
  local lists = LISTS[node.place]
  if not lists then
    lists = {}
    for _, where in ipairs(call('SMEMBERS', K .. 'lc:' .. node.place)) do lists[where] = true end
    LISTS[node.place] = lists
  end
  local order = {}
  for where in pairs(lists) do
    if where ~= C_BUSY then
      local level, cls = string.match(where, '^(%d+):(%d+)$')
      order[#order + 1] = {tonumber(level), tonumber(cls), where}
    end
  end
  table.sort(order, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  local found
  for _, o in ipairs(order) do
    if found and o[1] > found[1] then break end
    for i = 1, 2 do
      local id, at = end_of(list_key(node.place, o[3]), i == 2, skip)
      if id then
        at = tonumber(at)
        local worth = {o[1], o[1] ~= C_LEVEL_FREE and score_of(o[2], now - at) or 0, at, id}
        if not found or less(worth, found) then found = worth end
      end
    end
  end
  return found
end

-- how far the run may be trimmed in one go
local function evict_floor(r)
  local low = max(r.start, top_child(r), leased_to(r))
  if r.free then low = max(low, top_holder(r)) end
  local marks = marks_of(r)
  if #marks > 1 then low = max(low, marks[#marks - 1][1]) end
  for _, d in ipairs(shared_of(r)) do
    if d < r.stop then low = max(low, d) end
  end
  return low
end

-- false if it stopped at a victim that is worth more than `own` (nil: may not be declined)
local function evict(node, bytes, own, keep, keepdepth)
  while bytes > 0 and budget > 0 do
    local worth = worst(node, keep)
    if not worth and keep then worth = worst(node) end
    if not worth then return true end
    if own and worth[1] >= C_LEVEL_NORMAL and worth[2] > own then return false end
    local r = run_of(worth[4])
    local low = evict_floor(r)
    if r.id == keep then low = max(low, keepdepth) end
    local blocks = min(r.stop - low, budget, math.ceil(bytes / r.bb))
    if blocks <= 0 then return true end
    blocks = unpromised(r, blocks)
    if blocks == 0 then
      budget = budget - C_RUN_COST
    else
      if worth[1] == C_LEVEL_PINNED then count('pinned_overruns', blocks) end
      count(worth[1] == C_LEVEL_FREE and 'evicted_unwanted' or 'evicted', blocks)
      bytes = bytes - blocks * r.bb
      trim(r, r.stop - blocks)
    end
  end
  return true
end

-- shortens the copy of a run on a node; the bytes that die
local function uncopy(r, node, upto)
  local died, kept = 0, {}
  upto = max(upto, r.start)
  for _, c in ipairs(copies_of(r)) do
    if c[1] ~= node.idx or c[2] ~= node.epoch or c[3] <= upto then
      kept[#kept + 1] = c
    else
      for depth = c[3], upto + 1, -1 do
        bury(node, r.ns, hash_at(r, depth), r.bb, r.ranks)
        node.copies = node.copies - r.bb
        died = died + r.bb
      end
      if upto > r.start then
        kept[#kept + 1] = {c[1], c[2], upto}
      else
        call('ZREM', K .. 'cp:' .. node.place, r.id)
      end
    end
  end
  r.copies, r.dirty = kept, true
  count('copies_dropped', died / r.bb)
  return died
end

local function drop_copies(node, bytes, idle)
  local died, before = 0, #VICTIMS
  while died < bytes and #VICTIMS - before < 4 * C_BLOCKS_MAX do
    local first = call('ZRANGE', K .. 'cp:' .. node.place, 0, 0, 'WITHSCORES')
    if not first[1] or now - tonumber(first[2]) < idle then break end
    local gone = uncopy(run_of(first[1]), node, 0)
    -- no copy there: not to happen, and not to go round for ever if it does
    if gone == 0 then call('ZREM', K .. 'cp:' .. node.place, first[1]) end
    died = died + gone
  end
  return died
end

-- dying and sweeping --------------------------------------------------------------------------
local function reissue(node, limit)
  local due = call('ZRANGEBYSCORE', K .. 'do:' .. node.place, '-inf', now - C_REISSUE_MS,
    'LIMIT', 0, limit)
  if #due == 0 then return end
  local about = call('HMGET', dying_key(node), unpack(due))
  local args = {}
  for i, key in ipairs(due) do
    args[2 * i - 1], args[2 * i] = now, key
    local ranks, nslen = string.match(about[i], '^%d+ (%d+) (%d+)$')
    victim(sub(key, 1, nslen), sub(key, nslen + 1), node.name, tonumber(ranks))
  end
  each('ZADD', K .. 'do:' .. node.place, args)
end

-- removes what nobody needs from the end of the run upward; the blocks removed
local function free_up(r)
  local total = 0
  while r do
    local held = max(r.start, top_child(r), top_holder(r))
    local blocks = min(r.stop - max(held, leased_to(r)), budget)
    blocks = unpromised(r, max(0, blocks))
    if unwanted(r, r.stop - blocks) then r.free, r.dirty = true, true end
    if blocks == 0 then
      settle(r)
      break
    end
    local parent
    if r.parent ~= '' then parent = find(r.ns, r.parent) end
    local start, emptied = r.start, r.stop - blocks == r.start
    trim(r, r.stop - blocks)
    total = total + blocks
    r = emptied and parent and parent.stop == start and parent or nil
  end
  return total
end

local function sweep_free()
  local total = 0
  for idx = 1, M.nodes do
    local node = node_at(idx)
    wake(node)
    local list = list_key(node.place, C_LEVEL_FREE .. ':0')
    while budget > 0 do
      local id = call('ZRANGE', list, 0, 0)[1]
      if not id then break end
      local blocks = free_up(run_of(id))
      if blocks == 0 then break end
      total = total + blocks
    end
  end
  return total
end

local function free_left()
  for idx = 1, M.nodes do
    if call('EXISTS', list_key(node_at(idx).place, C_LEVEL_FREE .. ':0')) == 1 then return 1 end
  end
  return 0
end

-- removes blocks from the end of a leaf below the run; 0 if they are needed now
local function remove_below(r)
  while true do
    top_child(r)
    if not r.topid then break end
    if sub(r.topid, 1, 1) == 'g' then return 0 end
    r = run_of(r.topid)
  end
  local low = max(r.start, top_child(r), leased_to(r))
  local blocks = unpromised(r, max(0, min(r.stop - low, budget)))
  if blocks > 0 then trim(r, r.stop - blocks) end
  return blocks
end

local function sweep_dead()
  local total = 0
  for _, member in ipairs(call('ZRANGEBYSCORE', K .. 'dead', '-inf', now, 'LIMIT', 0,
    C_DEAD_PER_CALL)) do
    local idx, epoch = tonumber(sub(member, 1, 4)), tonumber(sub(member, 6))
    local place, steps = idx .. ':' .. epoch, C_SWEEP_STEPS
    while budget > 0 and steps > 0 do
      local first = call('ZRANGE', K .. 'pr:' .. place, 0, 0, 'WITHSCORES')
      if not first[1] or tonumber(first[2]) > now then break end
      steps = steps - 1
      local blocks = remove_below(run_of(first[1]))
      if blocks == 0 then
        call('ZADD', K .. 'pr:' .. place, now + C_DEAD_GRACE_MS, first[1])
      end
      total = total + blocks
    end
    if idx ~= 0 and not current(idx, epoch) and call('EXISTS', K .. 'pr:' .. place) == 0 then
      call('ZREM', K .. 'dead', member)
      call('DEL', K .. 'cp:' .. place)
    end
  end
  count('swept', total)
end
