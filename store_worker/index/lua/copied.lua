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
for i = 2, #ARGV, 3 do
  local node = node_named(ARGV[i + 2])
  local member = node and fmt('%04d', node.idx) .. ARGV[i] .. ARGV[i + 1]
  local text = member and call('HGET', K .. 'cy', member)
  if text then
    local bytes, _, epoch = string.match(text, '^(%d+) (%d+) (%d+) ')
    local r, depth = find(ARGV[i], ARGV[i + 1])
    if r and node.epoch == tonumber(epoch) and add_copy(r, depth, node, tonumber(bytes)) then
      count('copies_made')
    end
    end_copying(member)
  end
end
return done({})
