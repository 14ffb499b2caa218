-- ARGV: now, session, ttl ms, tenant, pinned bytes max -> 1 if it was granted
begin()
local s = open_session(ARGV[2], M.gen, ARGV[4])
if not charge_pin(s, tonumber(ARGV[5])) then
  count('pins_rejected')
  return done({0})
end
s.pin, s.dirty = max(s.pin, now + tonumber(ARGV[3])), true
call('ZADD', K .. 'sp', s.pin, s.key)
settle_held(s)
return done({1})
