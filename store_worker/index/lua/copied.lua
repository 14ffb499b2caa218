-- ARGV: now, then namespace, hash, node per step -> victims
begin()
local function add_copy(r, depth, node, size)
  local upto, kept = r.start, {}
  for _, c in ipairs(copies_of(r)) do
    if c[1] == node.idx then
      if c[2] == node.epoch then upto = c[3] end
    else
      kept[#kept + 1] = c
    end
  end
  if upto ~= depth - 1 or r.bb ~= size or r.node == node.idx
    or call('HEXISTS', dying_key(node), r.ns .. hash_at(r, depth)) == 1 then
    return false
  end
  kept[#kept + 1] = {node.idx, node.epoch, depth}
  r.copies, r.dirty = kept, true
  node.copies = node.copies + size
  node.dirty = true
  call('ZADD', K .. 'cp:' .. node.place, now, r.id)
  return true
end

-- a run that has left a draining node whole lies on the new one from now on
local function settle_over(r, node)
  local old = current(r.node, r.epoch)
  local mine, kept = nil, {}
  for _, c in ipairs(copies_of(r)) do
    if c[1] == node.idx then mine = c else kept[#kept + 1] = c end
  end
  if not old or old.drain == 0 or mine[3] < r.stop then return end
  local blocks = r.stop - r.start
  old.stored, old.blocks = old.stored - blocks * r.bb, old.blocks - blocks
  node.copies, node.stored = node.copies - blocks * r.bb, node.stored + blocks * r.bb
  node.blocks = node.blocks + blocks
  for depth = r.stop, r.start + 1, -1 do bury(old, r.ns, hash_at(r, depth), r.bb, r.ranks) end
  leave(r)
  r.copies, r.node, r.epoch = kept, node.idx, node.epoch
  call('ZREM', K .. 'cp:' .. node.place, r.id)
  call('ZADD', K .. 'pr:' .. node.place, 0, r.id)
  count('blocks_moved', blocks)
  settle(r)
end

for i = 2, #ARGV, 3 do
  local node = node_named(ARGV[i + 2])
  local member = node and fmt('%04d', node.idx) .. ARGV[i] .. ARGV[i + 1]
  local text = member and call('HGET', K .. 'cy', member)
  if text then
    local bytes, _, epoch = string.match(text, '^(%d+) (%d+) (%d+) ')
    local r, depth = find(ARGV[i], ARGV[i + 1])
    if r and node.epoch == tonumber(epoch) and add_copy(r, depth, node, tonumber(bytes)) then
      count('copies_made')
      settle_over(r, node)
    end
    end_copying(member)
  end
end
return done({})
