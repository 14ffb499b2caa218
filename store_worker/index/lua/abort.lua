-- ARGV: now, grant -> victims
call('DEL', K .. 'none')
begin()
local id = id12(tonumber(ARGV[2]))
local g = grant_of(id)
if g and not g.reply then
  settle_promise(g)
  call('ZREM', K .. 'gx', id)
  call('DEL', K .. 'g:' .. id)
  count('grants_aborted')
end
return done({})
