-- ARGV: now, namespace, session, generation, grant (0: touch), saved, parent, beyond, engine,
--   tenant, pinned bytes max, turn (0/1), new tokens, depth, hash, ... (boundaries)
-- -> outcome, number of already, ..., number of copies, five values each, then victims
begin()
local turn
if ARGV[12] == '1' then
  turn = {tokens = tonumber(ARGV[13])}
  for i = 14, #ARGV, 2 do
    turn[#turn + 1] = tonumber(ARGV[i])
    turn[#turn + 1] = ARGV[i + 1]
  end
end
local A = {
  ns = ARGV[2], session = ARGV[3], gen = tonumber(ARGV[4]), turn = turn, engine = ARGV[9],
  tenant = ARGV[10], pinned_max = tonumber(ARGV[11])
}

local function reply_of(outcome, already, copies)
  local reply = {outcome, #already}
  for _, i in ipairs(already) do reply[#reply + 1] = i end
  reply[#reply + 1] = #copies
  for _, c in ipairs(copies) do for i = 1, 5 do reply[#reply + 1] = c[i] end end
  return reply
end

local function touch()
  local path = {}
  if stale(A.session, A.gen) then return done({'stale_generation', 0, 0}) end
  if ARGV[7] ~= '' then
    local r, depth = find(A.ns, ARGV[7])
    path = r and walk(r, depth) or {}
    if not path[1] then return done({'missing_parent', 0, 0}) end
  end
  if A.session ~= '' then open_session(A.session, A.gen, A.tenant) end
  A.path, A.beyond = path, ARGV[8]
  return done(reply_of('ok', {}, arrive(A)))
end

-- a run whose every copy was lost lies on the node from now on
local function revive(r, g, node)
  local blocks, old = r.stop - r.start, current(r.node, r.epoch)
  local b, size = hashes_of(r)
  if old then
    old.stored = old.stored - blocks * r.bb
    old.blocks = old.blocks - blocks
    for depth = r.stop, r.start + 1, -1 do bury(old, r.ns, hash_at(r, depth), r.bb, r.ranks) end
  end
  for _, c in ipairs(copies_of(r)) do
    local at = current(c[1], c[2])
    if at then uncopy(r, at, r.start) end
  end
  leave(r)
  r.node, r.epoch, r.bb, r.ranks, r.copies = node.idx, node.epoch, g.bb, g.ranks, {}
  call('ZADD', K .. 'pr:' .. node.place, 0, r.id)
  node.stored = node.stored + blocks * g.bb
  node.blocks = node.blocks + blocks
  node.dirty = true
  count('blocks_replaced', blocks)
  settle(r)
end

local function may_grow(r, depth, g, blocks)
  if r.node ~= g.node or r.epoch ~= g.epoch or r.ranks ~= g.ranks or r.bb ~= g.bb
    or depth - r.start + blocks > C_BLOCKS_MAX then
    return false
  end
  if depth == r.stop then return call('ZCOUNT', K .. 'k:' .. r.id, depth, depth) == 0 end
  return g.session ~= '' and held_at(r, g.session) == r.stop
end

local function note_shared(r, depth, inside)
  local children = call('ZCOUNT', K .. 'k:' .. r.id, depth, depth) + inside
  local shared = shared_of(r)
  if children >= C_SHARED_CHILDREN then
    for _, d in ipairs(shared) do if d == depth then return end end
    shared[#shared + 1] = depth
    r.dirty = true
  end
end

local function attach(g, node, parent, first, last)
  local above, depth
  if parent ~= '' then above, depth = find(g.ns, parent) end
  depth = depth or 0
  local r = above
  if above and may_grow(above, depth, g, last - first + 1) then
    if depth < above.stop then
      r = split(above, depth)
      note_shared(r, depth, 1)
    end
  else
    M.run = M.run + 1
    r = {id = id12(M.run), ns = g.ns, parent = parent, start = depth, stop = depth,
         node = g.node, epoch = g.epoch, ranks = g.ranks, bb = g.bb, free = false, where = false,
         timer = false, marks = {}, leases = {}, copies = {}, shared = {}, b = ''}
    R[r.id] = r
    call('ZADD', K .. 'pr:' .. node.place, 0, r.id)
    if above then
      add_child(above, r.id, depth)
      note_shared(above, depth, depth < above.stop and 1 or 0)
    end
  end
  hashes_of(r)
  local args, parts = {}, {r.b}
  for i = first, last do
    r.stop = r.stop + 1
    args[#args + 1] = g.list[i]
    args[#args + 1] = r.id .. r.stop
    parts[#parts + 1] = g.list[i]
  end
  call('SADD', K .. 'nss', g.ns)
  each('HSET', K .. 'e:' .. g.ns, args)
  r.b, r.newb, r.dirty = concat(parts), true, true
  add_mark(r, r.stop, now, 0)
  if above and above ~= r and not above.gone then settle(above) end
  settle(r)
end

-- makes saved blocks visible; the indices of those that were already
local function list_blocks(g, node, saved)
  local already, i = {}, 1
  local got = call('HMGET', K .. 'e:' .. g.ns, unpack(g.list, 1, saved))
  while i <= saved do
    local r, depth = entry_of(got[i])
    if not r then break end
    if live_stop(r) >= depth then
      already[#already + 1] = i - 1
      i = i + 1
    else
      local last = depth - 1
      while last < r.stop and i <= saved and hash_at(r, last + 1) == g.list[i] do
        last = last + 1
        i = i + 1
      end
      if depth - 1 > r.start then
        local _, lower = split(r, depth - 1)
        r = lower
      end
      if last < r.stop then r = split(r, last) end
      revive(r, g, node)
    end
  end
  if i <= saved then
    attach(g, node, i > 1 and g.list[i - 1] or g.parent, i, saved)
    node.blocks = node.blocks + saved - i + 1
    node.stored = node.stored + (saved - i + 1) * g.bb
    node.dirty = true
  end
  count('blocks_committed', saved - #already)
  return already
end

local function outcome_of(g, node, saved)
  if not node then return 'expired' end
  if stale(g.session, g.gen) then return 'stale_generation' end
  if g.parent ~= '' then
    local r, depth = find(g.ns, g.parent)
    if not r or live_stop(r) < depth then return 'missing_parent' end
  end
  if saved > 0 then
    local keys = {}
    for i = 1, saved do keys[i] = g.ns .. g.list[i] end
    local dying = call('HMGET', dying_key(node), unpack(keys))
    for i = 1, saved do if dying[i] then return 'dying' end end
  end
  return 'ok'
end

local function whole(reply)
  local n = #reply
  for i = 1, #VICTIMS do reply[n + i] = VICTIMS[i] end
  return reply
end

-- replies are kept as lengths and values
local function pack(reply)
  local parts = {}
  for i, v in ipairs(reply) do
    local text = type(v) == 'number' and num(v) or v
    parts[i] = #text .. ':' .. text
  end
  return concat(parts)
end

local function unpack_reply(text)
  local reply, at = {}, 1
  while at <= #text do
    local size, from = string.match(text, '^(%d+):()', at)
    reply[#reply + 1] = sub(text, from, from + size - 1)
    at = from + size
  end
  return reply
end

if ARGV[5] == '0' then return touch() end
local g = grant_of(id12(tonumber(ARGV[5])))
if not g then return done({'expired', 0, 0}) end
if g.reply then return done(unpack_reply(g.reply)) end
local node = current(g.node, g.epoch)
local saved = min(max(0, tonumber(ARGV[6])), g.n)
local outcome, already = outcome_of(g, node, saved), {}
if outcome == 'ok' and saved > 0 then already = list_blocks(g, node, saved) end
settle_promise(g)
local copies = {}
if outcome == 'ok' then
  local tip = saved > 0 and g.list[saved] or g.parent
  local path = {}
  if tip ~= '' then path = walk(find(g.ns, tip)) or {} end
  A.ns, A.session, A.gen, A.path, A.tokens, A.beyond = g.ns, g.session, g.gen, path, g.tokens, ''
  copies = arrive(A)
end
count('commit_' .. outcome)
local reply = whole(reply_of(outcome, already, copies))
call('HSET', K .. 'g:' .. g.id, 'reply', pack(reply), 'n', 0)
call('HDEL', K .. 'g:' .. g.id, 'hashes')
call('ZADD', K .. 'gx', now + C_REPLY_KEPT_MS, g.id)
flush()
return reply
