-- ARGV: now, session, priority, ttl ms (0: until it is closed), tenant
begin()
local s = open_session(ARGV[2], M.gen, ARGV[5])
local ttl = tonumber(ARGV[4])
s.prio = min(max(tonumber(ARGV[3]), C_PRIORITY_MIN), C_PRIORITY_MAX)
s.puntil, s.dirty = ttl > 0 and now + ttl or C_NEVER_MS, true
settle_held(s)
return done({})
