-- ARGV: now, name
begin()
local node = node_named(ARGV[2])
if node and node.up == 1 then
  node.up, node.dirty = 0, true
  call('ZADD', K .. 'dead', now + C_DOWN_GRACE_MS, fmt('%04d:%08d', node.idx, node.epoch))
end
return done({})
