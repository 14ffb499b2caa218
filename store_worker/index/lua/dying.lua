-- ARGV: now, node -> victims
call('DEL', K .. 'none')
begin()
expire()
tidy()
sweep_free()
sweep_dead()
local node = node_named(ARGV[2])
if node then reissue(node, C_BLOCKS_MAX) end
return done({})
