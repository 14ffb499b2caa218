-- Copies of shared parts, and moves away from a draining node, as in copies.py.
-- keep, keepdepth: what no copy may push out; bounded: to the share that copies may take
local function copy_to(steps, r, upto, node, keep, keepdepth, bounded)
  if node.up == 0 or node.drain == 1 or node.cap == 0 then return end
  local at, source = r.start, node_at(r.node)
  for _, c in ipairs(copies_of(r)) do
    if c[1] == node.idx and c[2] == node.epoch then at = max(at, c[3]) end
  end
  while at < upto and #steps < C_COPY_BLOCKS_PER_CALL do
    local block = hash_at(r, at + 1)
    local member = fmt('%04d', node.idx) .. r.ns .. block
    if call('HEXISTS', K .. 'cy', member) == 1
      or call('HEXISTS', dying_key(node), r.ns .. block) == 1
      or (bounded and node.copies + r.bb > floor(node.cap * C_COPY_PERCENT / 100)) then
      break
    end
    if used(node) + r.bb > node.cap then
      -- next time there is room
      wake(node)
      evict(node, r.bb * min(upto - at, C_COPY_BLOCKS_PER_CALL) - node.dying, nil, keep, keepdepth)
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

local function plan_copies(path, shared)
  local steps = {}
  if shared == 0 or M.nodes < 2 then return steps end
  local keep, keepdepth = path[1][1].id, path[1][2]
  for i = #path, 1, -1 do
    local r, upto = path[i][1], min(path[i][2], shared)
    if not reachable(r.node, r.epoch) or upto <= r.start then break end
    for idx = 1, M.nodes do
      if idx ~= r.node then copy_to(steps, r, upto, node_at(idx), keep, keepdepth, true) end
    end
  end
  return steps
end
