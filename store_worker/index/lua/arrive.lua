-- A chain was used by a save or a touch, and copies of shared parts: commits.py, copies.py.
local function copy_to(steps, r, upto, node, source, high)
  if node.up == 0 or node.drain == 1 or node.cap == 0 then return end
  local at = r.start
  for _, c in ipairs(copies_of(r)) do
    if c[1] == node.idx and c[2] == node.epoch then at = max(at, c[3]) end
  end
  while at < upto and #steps < C_COPY_BLOCKS_PER_COMMIT do
    local block = hash_at(r, at + 1)
    local member = fmt('%04d', node.idx) .. r.ns .. block
    if call('HEXISTS', K .. 'cy', member) == 1
      or call('HEXISTS', dying_key(node), r.ns .. block) == 1
      or used(node) + r.bb > floor(node.cap * high)
      or node.copies + r.bb > floor(node.cap * C_COPY_PERCENT / 100) then
      break
    end
    call('HSET', K .. 'cy', member, fmt('%.0f %d %d %d', r.bb, r.ranks, node.epoch, #r.ns))
    call('ZADD', K .. 'cx', now + C_COPY_ROOM_MS, member)
    node.granted = node.granted + r.bb
    node.dirty = true
    steps[#steps + 1] = {r.ns, block, source.name, node.name, r.ranks}
    at = at + 1
  end
end

local function plan_copies(path, shared, high)
  local steps = {}
  if shared == 0 or M.nodes < 2 then return steps end
  for i = #path, 1, -1 do
    local r, upto = path[i][1], min(path[i][2], shared)
    local source = reachable(r.node, r.epoch) and node_at(r.node)
    if not source or upto <= r.start then break end
    for idx = 1, M.nodes do
      local node = node_at(idx)
      if #steps < C_COPY_BLOCKS_PER_COMMIT and node ~= source then
        copy_to(steps, r, upto, node, source, high)
      end
    end
  end
  return steps
end

-- a: ns, session, gen, path, turn or nil, tokens (nil: keep the class), beyond, engine, tenant,
-- high, pinned_max
local function arrive(a)
  local s = session_of(a.session)
  if a.session ~= '' and not s then s = open_session(a.session, a.gen, a.tenant) end
  local path = a.path
  local private, shared = first_private(path, a.beyond)
  local cls
  if a.turn then
    cls = end_turn(a.ns, path, private, shared, a.turn)
    if s then
      s.turns, s.dirty = s.turns + 1, true
      remember(s, a.ns, a.turn)
    end
  elseif a.tokens then
    cls = class_now(a.ns, private, a.tokens)
  end
  if s then used_by(s, a.engine) end
  if not path[1] then return {} end
  local r, depth = path[1][1], path[1][2]
  hold(a.session, path)
  r.free = false
  if not cls then
    local mark = mark_at(r, depth)
    cls = mark and mark[3] or 0
  end
  add_mark(r, depth, now, cls)
  settle(r)
  if s and s.pin > now then repin(s, a.pinned_max) end
  return plan_copies(path, shared, a.high)
end
