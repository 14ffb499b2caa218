-- ARGV: now, then namespace, hash, node per victim
call('DEL', K .. 'none')
begin()
local keys = {}
for i = 2, #ARGV, 3 do
  local name = ARGV[i + 2]
  keys[name] = keys[name] or {}
  table.insert(keys[name], ARGV[i] .. ARGV[i + 1])
end
for name, list in pairs(keys) do
  local node = node_named(name)
  if node then
    for i = 1, #list, 1000 do
      local last = min(i + 999, #list)
      local about = call('HMGET', dying_key(node), unpack(list, i, last))
      local seen = {}
      for j = i, last do
        local text = about[j - i + 1]
        if text and not seen[list[j]] then
          seen[list[j]] = true
          node.dying = node.dying - tonumber(string.match(text, '^%d+'))
          node.dirty = true
        end
      end
      call('HDEL', dying_key(node), unpack(list, i, last))
      call('ZREM', K .. 'do:' .. node.place, unpack(list, i, last))
    end
  end
end
return done({})
