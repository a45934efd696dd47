-- Covenant on PostgreSQL: the whole schema.
--
-- A commit changes named records and appends one line to the log. `record` holds the records as they are now, `place`
-- says in which listings each one stands, `task` lists tasks by who sent and received them, `log` keeps the commits as
-- they were made, chained by lane. Everything else is about the daemons. A record's body is JSON, the same that a
-- journal's snapshot holds; `ord` is the number of the event that last touched it, and so its version.
--
-- Rules live in the program. A function here only saves round trips: it loads, or it saves, what it is told.

create table meta (
    one        boolean primary key default true check (one),
    version    integer not null,                 -- of this schema
    store      text    not null,                 -- one store's name for itself, made once
    trust      bigint  not null default 0        -- the last event that touched a peer, a grant, a card or the horizon
);
insert into meta (version, store) values (1, gen_random_uuid()::text);

-- Every transaction that appends draws one block of event numbers, after it has locked what it read: so the numbers of
-- one record only ever grow. A block that was drawn in vain leaves a gap.
create sequence block increment by 4096 start with 4096 cache 1;

create table record (
    key   text collate "C" primary key,
    kind  "char" not null,
    ord   bigint not null,
    body  bytea  not null
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);

-- The listings. `ord` is their order: an event's number, or a time for what is due.
create table place (
    shelf "char" not null,
    name  text collate "C" not null,
    ord   bigint not null,
    key   text collate "C" not null,
    note  text collate "C",                       -- of what is ready: its kind
    primary key (shelf, name, ord, key)
) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

create index place_note on place (name, note, ord) where note is not null;

-- Who sent what to whom, and whether it is still open; a row goes with its task.
create table task (
    ord       bigint primary key,
    key       text collate "C" not null,
    sender    text collate "C" not null,
    recipient text collate "C" not null,
    parent    text collate "C",
    open      boolean not null
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
create index task_sender on task (open, sender, ord);
create index task_recipient on task (open, recipient, ord);
create index task_parent on task (parent, ord) where parent is not null;

-- One row a transaction, or one for each block of numbers that it has drawn: its commits as lines, each of them one that
-- a journal could hold. Between `seq` and `last` there is no number of anybody else, so an event is found by its number.
-- `marks` names the tasks that they touched, each with the event that touched the task before.
create table log (
    seq   bigint primary key,
    last  bigint not null,
    lane  integer not null,
    at    bigint not null,                        -- when it was made, in milliseconds
    marks text   not null,
    lines bytea  not null
);
alter table log alter column lines set storage external;  -- to compress these costs more than it saves
alter table log alter column marks set storage external;

-- A process that has this store open. Who holds the credentials of the database is one of these.
create table daemon (
    id         text primary key,
    pubkey     text,                              -- its own key, by which it signs the ends of its chains
    label      text not null,
    started_ms bigint not null,
    seen       timestamptz not null default clock_timestamp(),
    ended      timestamptz,
    proof      text                               -- how it was known to have ended: it said so, or it was silent
);

-- What the daemon that leads leaves to the next one.
create table note (
    name text primary key,
    body bytea not null
);

-- One chain of the log: a connection that has one transaction open at a time. Who appends says which hash it builds on.
create table lane (
    id      integer generated always as identity primary key,
    daemon  text not null references daemon,
    seq     bigint not null default 0,            -- the last commit
    hash    text not null,
    signed  bigint not null default 0,            -- the last commit under a signature
    closed  boolean not null default false
);
create index lane_daemon on lane (daemon);

-- While a daemon is alone, it may append to the log and leave the tables for later: they then lack what this lane has
-- committed since `settled`, and all of that is in the log. Whoever else comes brings them up to date first (`settle`),
-- and whoever finds this row decides nothing. No row: the tables are whole.
create table ahead (
    one     boolean primary key default true check (one),
    lane    integer not null references lane,
    settled bigint not null                       -- the last commit that the tables show
);

-- Where a chain begins once its beginning was pruned: signed by the daemon that pruned.
create table anchor (
    lane      integer primary key references lane,
    seq       bigint not null,                    -- the last commit that is gone
    hash      text   not null,
    pubkey    text   not null,
    signature text   not null
);

-- Where a chain was copied in from a journal: the headers of its segments, which are links of the chain and no commits.
-- Each stands before the commit that has this number, or would have it.
create table seam (
    lane integer not null references lane,
    seq  bigint not null,
    line bytea  not null,
    primary key (lane, seq)
);

-- Load for a command: lock the records with these keys, and the first ones of some listings, as many as there is room
-- for; a row without a body says that there is more. The heads are the commonest: what is ready or answered for somebody,
-- each with the number of its place, as it was before the keys were waited for. The last rows say how far trust is, which
-- block of numbers was drawn, and what is due next.
create function load(
    mode integer,                                 -- 0: further in a transaction; its beginning: 1, or 2 to change trust,
                                                  -- or 3 to wait for no record
    space integer,
    keys text[],
    head_numbers integer[], head_shelves "char"[], head_names text[], head_limits integer[],
    numbers integer[], shelves "char"[], names text[], limits integer[],
    kinds text[],                                 -- of what is ready: those of these kinds, as JSON; or null: all
    room bigint                                   -- bytes of bodies
) returns table (what integer, key text, kind "char", ord bigint, body bytea)
language plpgsql as $$
#variable_conflict use_column
declare
    i integer;
    standing refcursor;
    is_bounded boolean;
    wanted text[];
    locked text[];
    depth integer;
    seen integer;
begin
    if mode in (1, 3) then
        perform pg_advisory_xact_lock_shared(space, 1);
    elsif mode = 2 then
        perform pg_advisory_xact_lock(space, 1);
    end if;
    if mode > 0 and exists (select from ahead) then
        raise exception 'the log is ahead of the tables' using errcode = 'CV005';
    end if;
    perform pg_current_xact_id();
    if mode in (0, 3) then
        return query select s.i, s.key, s.kind, s.ord, case when s.upto - octet_length(s.body) <= room then s.body end
        from (select l.*, sum(octet_length(l.body)) over (rows unbounded preceding) as upto from (
            select -1 as i, r.* from (
                select r.key, r.kind, r.ord, r.body from record r where r.key = any(keys) order by r.key for update nowait) r
            union all
            select u.i, r.* from unnest(head_numbers, head_shelves, head_names, head_limits) u(i, shelf, name, most)
            cross join lateral (
                select r.key, r.kind, p.ord, r.body from place p join record r on r.key = p.key
                where p.shelf = u.shelf and p.name = u.name
                order by p.ord limit u.most for update of r skip locked) r) l) s;
    else
        return query select s.i, s.key, s.kind, s.ord, case when s.upto - octet_length(s.body) <= room then s.body end
        from (select l.*, sum(octet_length(l.body)) over (rows unbounded preceding) as upto from (
            select -1 as i, r.* from (
                select r.key, r.kind, r.ord, r.body from record r where r.key = any(keys) order by r.key for update) r
            union all
            select u.i, r.* from unnest(head_numbers, head_shelves, head_names, head_limits) u(i, shelf, name, most)
            cross join lateral (
                select r.key, r.kind, p.ord, r.body from place p join record r on r.key = p.key
                where p.shelf = u.shelf and p.name = u.name
                order by p.ord limit u.most for update of r skip locked) r) l) s;
    end if;
    for i in 1 .. coalesce(cardinality(shelves), 0) loop
        is_bounded := shelves[i] in ('R', 'A');  -- of the others, one that is left out would be missed
        if is_bounded and room < 0 then
            return query select numbers[i], null::text, null::"char", null::bigint, null::bytea;
            continue;
        end if;
        if kinds[i] is not null and names[i] <> '*' and json_array_length(kinds[i]::json) = 1 then
            open standing for select numbers[i], r.key, r.kind, r.ord, r.body
                from place p join record r on r.key = p.key
                where p.name = names[i] and p.note = kinds[i]::json ->> 0
                order by p.ord limit limits[i] for update of r skip locked;
        elsif is_bounded then
            wanted := array(select json_array_elements_text(kinds[i]::json));
            depth := limits[i];
            loop  -- the oldest of each name and kind; and more of them, if those are locked by others
                with recursive each_name as (
                    (select p.name from place p where p.shelf = shelves[i] and names[i] = '*' order by p.name limit 1)
                    union all
                    select (select p.name from place p where p.shelf = shelves[i] and p.name > e.name order by p.name limit 1)
                    from each_name e where e.name is not null
                ), oldest as (
                    select p.ord, p.key
                    from (select name from each_name where name is not null union all select nullif(names[i], '*')) e
                    cross join lateral (
                        (select q.ord, q.key from place q where kinds[i] is null
                            and q.shelf = shelves[i] and q.name = e.name order by q.ord limit depth)
                        union all
                        select n.ord, n.key from unnest(wanted) k cross join lateral (
                            select q.ord, q.key from place q
                            where q.name = e.name and q.note = k order by q.ord limit depth
                        ) n
                    ) p order by p.ord limit depth
                )
                select array(select r.key from oldest o join record r on r.key = o.key
                             order by o.ord limit limits[i] for update of r skip locked),
                       (select count(*) from oldest) into locked, seen;
                exit when cardinality(locked) >= limits[i] or seen < depth;
                depth := depth * 8;
            end loop;
            open standing for select numbers[i], r.key, r.kind, r.ord, r.body
                from unnest(locked) with ordinality l(key, at) join record r on r.key = l.key order by l.at;
        else
            open standing for select numbers[i], r.key, r.kind, r.ord, r.body
                from place p join record r on r.key = p.key
                where p.shelf = shelves[i] and p.name = names[i]
                order by p.ord limit limits[i] for update of r nowait;
        end if;
        loop
            fetch standing into what, key, kind, ord, body;
            exit when not found;
            return next;
            room := room - case when is_bounded then octet_length(body) else 0 end;
            if room < 0 and is_bounded then  -- there may be more
                body := null;
                return next;
                exit;
            end if;
        end loop;
        close standing;
    end loop;
    return query select -2, null::text, null::"char", m.trust, null::bytea from meta m
        union all select -3, null, null, nextval('block'), null
        union all (select -4, p.key, null, p.ord, null from place p where p.shelf = 'D' order by p.name, p.ord limit 1);
end $$;

-- Put records, their places and the list of tasks in the tables. Records that have changed must be what they were.
create function put(
    new_keys text[], new_kinds "char"[], new_ords bigint[], new_bodies bytea[],
    old_keys text[], old_kinds "char"[], old_ords bigint[], old_bodies bytea[], old_were bigint[],
    gone_keys text[],
    in_shelves "char"[], in_names text[], in_ords bigint[], in_keys text[], in_notes text[],
    out_shelves "char"[], out_names text[], out_ords bigint[], out_keys text[],
    from_shelves "char"[], from_names text[], from_ords bigint[], moved_keys text[],  -- from one place to another
    to_shelves "char"[], to_names text[], to_ords bigint[], to_notes text[],
    task_ords bigint[], task_keys text[], senders text[], recipients text[], parents text[], opens boolean[],
    task_gone bigint[], turned_ords bigint[], turned_open boolean[]
) returns void
language plpgsql as $$
declare
    touched integer;
begin
    if cardinality(old_keys) > 0 then
        update record r set kind = u.kind, ord = u.ord, body = u.body
        from unnest(old_keys, old_kinds, old_ords, old_bodies, old_were) u(key, kind, ord, body, was)
        where r.key = u.key and r.ord = u.was;
        get diagnostics touched = row_count;
        if touched <> cardinality(old_keys) then
            raise exception 'a record has changed meanwhile' using errcode = '40001';
        end if;
    end if;
    if cardinality(new_keys) > 0 then
        insert into record select * from unnest(new_keys, new_kinds, new_ords, new_bodies);
    end if;
    if cardinality(gone_keys) > 0 then
        delete from record where key = any(gone_keys);
    end if;
    if cardinality(out_keys) > 0 then
        delete from place p using unnest(out_shelves, out_names, out_ords, out_keys) u(shelf, name, ord, key)
        where p.shelf = u.shelf and p.name = u.name and p.ord = u.ord and p.key = u.key;
    end if;
    if cardinality(in_keys) > 0 then
        insert into place select * from unnest(in_shelves, in_names, in_ords, in_keys, in_notes);
    end if;
    if cardinality(moved_keys) > 0 then
        update place p set shelf = u.to_shelf, name = u.to_name, ord = u.to_ord, note = u.to_note
        from unnest(from_shelves, from_names, from_ords, moved_keys, to_shelves, to_names, to_ords, to_notes)
            u(shelf, name, ord, key, to_shelf, to_name, to_ord, to_note)
        where p.shelf = u.shelf and p.name = u.name and p.ord = u.ord and p.key = u.key;
        get diagnostics touched = row_count;
        if touched <> cardinality(moved_keys) then
            insert into place select * from unnest(to_shelves, to_names, to_ords, moved_keys, to_notes)
            on conflict do nothing;
        end if;
    end if;
    if cardinality(task_gone) > 0 then
        delete from task where ord = any(task_gone);
    end if;
    if cardinality(task_keys) > 0 then
        insert into task select * from unnest(task_ords, task_keys, senders, recipients, parents, opens);
    end if;
    if cardinality(turned_ords) > 0 then
        update task t set open = u.open from unnest(turned_ords, turned_open) u(ord, open) where t.ord = u.ord;
    end if;
end $$;

-- Save what a transaction has decided. Refused when its lane is not what it believes it to be: it was closed, or the
-- transaction before has not come to the end that its writer thought.
--
-- What was decided on memory, and not on what was loaded, is saved at once if the store is as it was remembered: nobody
-- has drawn a block since (so no number can come behind one that was told of), trust is what it was, nothing is due, and
-- on each shelf from which something was taken nothing else stands before it. That the records are what they were is
-- looked at for any save.
create function save(
    on_block bigint, space integer, on_trust bigint,          -- 0: what was loaded in this transaction
    head_shelves "char"[], head_names text[], head_ords bigint[], head_counts integer[],
    in_lane integer, hash_before text, hash_after text, last_seq bigint, trust_to bigint,
    new_keys text[], new_kinds "char"[], new_ords bigint[], new_bodies bytea[],
    old_keys text[], old_kinds "char"[], old_ords bigint[], old_bodies bytea[], old_were bigint[],
    gone_keys text[],
    in_shelves "char"[], in_names text[], in_ords bigint[], in_keys text[], in_notes text[],
    out_shelves "char"[], out_names text[], out_ords bigint[], out_keys text[],
    from_shelves "char"[], from_names text[], from_ords bigint[], moved_keys text[],  -- from one place to another
    to_shelves "char"[], to_names text[], to_ords bigint[], to_notes text[],
    task_ords bigint[], task_keys text[], senders text[], recipients text[], parents text[], opens boolean[],
    task_gone bigint[], turned_ords bigint[], turned_open boolean[],
    log_at bigint, log_seqs bigint[], log_lasts bigint[], log_marks text[], log_lines bytea[]
) returns void
language plpgsql as $$
declare
    waited text;
    block_now bigint;
    is_other boolean;
    crowded json;
begin
    if on_block > 0 then
        waited := pg_advisory_xact_lock_shared(space, 1);
        waited := pg_current_xact_id();  -- before the look at the block: who draws after it sees this as open
        select b.last_value, m.trust <> on_trust
                or exists (select from place where shelf = 'D' and name = '' and ord <= log_at),
            (select json_agg(json_build_array(u.shelf, u.name))
             from unnest(head_shelves, head_names, head_ords, head_counts) u(shelf, name, ord, count)
             where u.count <> (select count(*) from (
                select from place p where p.shelf = u.shelf and p.name = u.name and p.ord <= u.ord limit u.count + 1) p))
        into block_now, is_other, crowded from block b, meta m;
        if exists (select from ahead) then
            raise exception 'the log is ahead of the tables' using errcode = 'CV005';
        elsif block_now <> on_block then
            raise exception 'somebody has drawn numbers since' using errcode = 'CV002';
        elsif is_other then
            raise exception 'this is not as it was remembered' using errcode = 'CV004';
        elsif crowded is not null then
            raise exception 'there is more on these shelves' using errcode = 'CV003', detail = crowded;
        end if;
    end if;
    update lane set hash = hash_after, seq = last_seq where id = in_lane and hash = hash_before and not closed;
    if not found then
        raise exception 'this lane is not open any more' using errcode = 'CV001';
    end if;
    perform put(
        new_keys, new_kinds, new_ords, new_bodies, old_keys, old_kinds, old_ords, old_bodies, old_were, gone_keys,
        in_shelves, in_names, in_ords, in_keys, in_notes, out_shelves, out_names, out_ords, out_keys,
        from_shelves, from_names, from_ords, moved_keys, to_shelves, to_names, to_ords, to_notes,
        task_ords, task_keys, senders, recipients, parents, opens, task_gone, turned_ords, turned_open);
    insert into log select u.seq, u.last, in_lane, log_at, u.marks, u.lines
    from unnest(log_seqs, log_lasts, log_marks, log_lines) u(seq, last, marks, lines);
    if trust_to > 0 then
        update meta set trust = trust_to;
    end if;
end $$;

-- Go ahead of the tables in this lane: what is committed there from now on is in the log alone. Only for a daemon that is
-- alone, and knows whom to trust: one that was taken for dead may still read, as long as it has a session. The first and
-- the last of the blocks of numbers that it may use; nothing where it may not go ahead.
create function go_ahead(space integer, in_lane integer, hash_now text, on_trust bigint, me text, blocks integer)
returns bigint[]
language plpgsql as $$
declare
    drawn bigint[];
begin
    perform pg_advisory_xact_lock(space, 1);
    insert into ahead (lane, settled)
    select l.id, l.seq from lane l, meta m
    where l.id = in_lane and l.hash = hash_now and not l.closed and l.daemon = me and m.trust = on_trust
        and not exists (select from daemon d where d.ended is null and d.id <> me)
        and not exists (
            select from pg_stat_activity a join daemon d on d.id = substr(a.application_name, length('covenant ') + 1)
            where d.id <> me)
    on conflict do nothing;
    if found then
        select array_agg(nextval('block')) into drawn from generate_series(1, blocks);
    end if;
    return drawn;
end $$;

-- Append to the log alone. Refused where the lane is not what it is believed to be, or nobody is ahead in it any more, or
-- somebody has drawn numbers, or something is due, or there is something under a key that was taken for fresh.
create function append(
    space integer, in_lane integer, hash_before text, hash_after text, on_block bigint, fresh text[],
    first_seq bigint, last_seq bigint, log_at bigint, log_marks text, log_lines bytea
) returns void
language plpgsql as $$
declare
    waited text;
begin
    waited := pg_advisory_xact_lock_shared(space, 1);
    waited := pg_current_xact_id();  -- before the look at the block: who draws after it sees this as open
    update lane set hash = hash_after, seq = last_seq
    where id = in_lane and hash = hash_before and not closed
        and exists (select from ahead where lane = in_lane)
        and on_block = (select last_value from block)
        and not exists (select from place where shelf = 'D' and name = '' and ord <= log_at)
        and (cardinality(fresh) = 0 or not exists (select from record where key = any(fresh)));
    if not found then
        if exists (select from lane where id = in_lane and hash = hash_before and not closed) then
            raise exception 'this is not as it was remembered' using errcode = 'CV004';
        end if;
        raise exception 'this lane is not open any more' using errcode = 'CV001';
    end if;
    insert into log values (first_seq, last_seq, in_lane, log_at, log_marks, log_lines);
end $$;

-- Bring the tables up to date with what a lane has appended, so far, or for good. Refused where the log does not have all
-- of it: a replica that lacks the last commits may have taken over.
create function settle(
    space integer, in_lane integer, settled_before bigint, settled_to bigint, is_last boolean,
    new_keys text[], new_kinds "char"[], new_ords bigint[], new_bodies bytea[],
    old_keys text[], old_kinds "char"[], old_ords bigint[], old_bodies bytea[], old_were bigint[],
    gone_keys text[],
    in_shelves "char"[], in_names text[], in_ords bigint[], in_keys text[], in_notes text[],
    out_shelves "char"[], out_names text[], out_ords bigint[], out_keys text[],
    from_shelves "char"[], from_names text[], from_ords bigint[], moved_keys text[],  -- from one place to another
    to_shelves "char"[], to_names text[], to_ords bigint[], to_notes text[],
    task_ords bigint[], task_keys text[], senders text[], recipients text[], parents text[], opens boolean[],
    task_gone bigint[], turned_ords bigint[], turned_open boolean[]
) returns void
language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(space, 1);
    if not exists (select from lane where id = in_lane and seq >= settled_to) then
        raise exception 'the log lacks what the tables were to show' using errcode = 'CV004';
    end if;
    if is_last then
        delete from ahead where lane = in_lane and settled = settled_before;
    else
        update ahead set settled = settled_to where lane = in_lane and settled = settled_before;
    end if;
    if not found then
        raise exception 'somebody else has brought the tables up to date' using errcode = 'CV004';
    end if;
    perform put(
        new_keys, new_kinds, new_ords, new_bodies, old_keys, old_kinds, old_ords, old_bodies, old_were, gone_keys,
        in_shelves, in_names, in_ords, in_keys, in_notes, out_shelves, out_names, out_ords, out_keys,
        from_shelves, from_names, from_ords, moved_keys, to_shelves, to_names, to_ords, to_notes,
        task_ords, task_keys, senders, recipients, parents, opens, task_gone, turned_ords, turned_open);
end $$;

-- The transactions that touched a task, from the one that holds this event back.
create function trail(from_seq bigint, of_key text, up_to integer)
returns table (seq bigint, lines bytea)
language plpgsql stable as $$
#variable_conflict use_column
declare
    here log%rowtype;
    here_at bigint := from_seq;  -- no column is called that
begin
    for i in 1 .. up_to loop
        select l.* into here from log l where l.seq <= here_at order by l.seq desc limit 1;
        exit when not found or here.last < here_at;
        seq := here.seq;
        lines := here.lines;
        return next;
        here_at := substring(here.marks from of_key || ':(\d+)')::bigint;
        exit when here_at is null or here_at = 0;
    end loop;
end $$;
