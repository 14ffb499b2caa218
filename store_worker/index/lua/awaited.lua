-- ARGV: now, namespace, tip -> 1 if it is neither listed nor abandoned
begin()
flush()
local since = call('ZSCORE', K .. 'ab', ARGV[2] .. ARGV[3])
if since and tonumber(since) > now - C_ABANDONED_MS then return 0 end
return 1 - call('HEXISTS', K .. 'e:' .. ARGV[2], ARGV[3])
