-- ARGV: now, owner, ttl ms -> 1 if it leads
begin()
local got = call('HMGET', K .. 'ld', 'owner', 'until')
flush()
if got[1] and got[1] ~= ARGV[2] and now < tonumber(got[2]) then return 0 end
call('HSET', K .. 'ld', 'owner', ARGV[2], 'until', num(now + tonumber(ARGV[3])))
return 1
