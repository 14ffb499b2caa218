-- A chain was used by a save or a touch, as in commits.py.
-- a: ns, session, gen, path, turn or nil, tokens (nil: keep the class), beyond, engine, tenant,
-- pinned_max
local function arrive(a)
  local s = session_of(a.session)
  if a.session ~= '' and not s then s = open_session(a.session, a.gen, a.tenant) end
  local path = a.path
  local private, shared = first_private(path, a.beyond)
  local cls
  if a.turn then
    cls = end_turn(a.ns, path, private, shared, a.turn)
    if s then
      s.turns, s.dirty = s.turns + 1, true
      remember(s, a.ns, a.turn)
    end
  elseif a.tokens then
    cls = class_now(a.ns, private, a.tokens)
  end
  if s then used_by(s, a.engine) end
  if not path[1] then return {} end
  local r, depth = path[1][1], path[1][2]
  hold(a.session, path)
  r.free = false
  if not cls then
    local mark = mark_at(r, depth)
    cls = mark and mark[3] or 0
  end
  add_mark(r, depth, now, cls)
  settle(r)
  if s and s.pin > now then repin(s, a.pinned_max) end
  return plan_copies(path, shared)
end
