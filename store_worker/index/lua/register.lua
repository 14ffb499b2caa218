-- ARGV: now, name, incarnation, capacity
begin()
local node = node_named(ARGV[2])
local function member(n) return fmt('%04d:%08d', n.idx, n.epoch) end
if not node then
  M.nodes = M.nodes + 1
  call('HSET', K .. 'nodes', ARGV[2], M.nodes)
  node = {idx = M.nodes, name = ARGV[2], inc = ARGV[3], epoch = 1, up = 1, drain = 0, cap = 0,
          stored = 0, copies = 0, granted = 0, dying = 0, blocks = 0, rm = 0, rn = 0, rb = 0}
  N[node.idx] = node
elseif node.inc ~= ARGV[3] then
  call('ZREM', K .. 'dead', member(node))
  local runs = call('EXISTS', K .. 'pr:' .. node.place)
  call('ZADD', K .. 'dead', now + (runs == 1 and C_DEAD_GRACE_MS or 0), member(node))
  call('UNLINK', dying_key(node), K .. 'do:' .. node.place, K .. 'gh:' .. node.place)
  node.inc, node.epoch = ARGV[3], node.epoch + 1
  node.stored, node.copies, node.granted, node.dying, node.blocks = 0, 0, 0, 0, 0
  count('nodes_lost')
else
  call('ZREM', K .. 'dead', member(node))
end
call('HSET', K .. 'n:' .. node.idx, 'name', node.name, 'inc', node.inc)
node.up, node.cap, node.dirty = 1, tonumber(ARGV[4]), true
return done({})
