//! A table under load: quotas, protection, sweeps.

use super::super::quota::CallKind;
use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);
const EVICTABLE: Lifetime = Lifetime { ttl: HOUR, protected_for: Duration::ZERO };
const PROTECTED: Lifetime = Lifetime { ttl: HOUR, protected_for: HOUR };

/// A table in which every one of `agents` agents has about `bytes` bytes.
fn table(bytes: usize, agents: usize) -> BoundedTable<usize> {
    let quotas = Quotas::new((bytes * 4 * agents) as u64);
    BoundedTable::new(&quotas, QuotaKind::Task)
}

fn put(
    table: &mut BoundedTable<usize>,
    agent: &str,
    id: usize,
    bytes: usize,
    lifetime: Lifetime,
    now: Instant,
) -> Result<(), Full> {
    put_for(table, &Caller::default(), agent, id, bytes, lifetime, now)
}

fn put_for(
    table: &mut BoundedTable<usize>,
    caller: &Caller,
    agent: &str,
    id: usize,
    bytes: usize,
    lifetime: Lifetime,
    now: Instant,
) -> Result<(), Full> {
    let mut removed = Removed::default();
    let id_text = id.to_string();
    let entry = table.entry(&agent.into(), &id_text, now, &mut removed).of_caller(caller);
    let put = entry.put(id, bytes, lifetime);
    assert!(removed.rows.len() <= ROWS_PER_STEP + 2 * EXPIRED_PER_WRITE + 1, "a write is short");
    removed.evict_rest(|removed| {
        table.evict(agent, now, removed);
        assert!(removed.rows.len() <= ROWS_PER_STEP, "a step is short");
    });
    put
}

fn holds(table: &BoundedTable<usize>, agent: &str, id: usize, now: Instant) -> bool {
    table.get(agent, &id.to_string(), now) == Some(&id)
}

/// Checks that all parts of the table agree; returns the number of rows of an agent.
fn check(table: &BoundedTable<usize>, agent: &str) -> usize {
    let Some(rows) = table.agents.get(agent) else { return 0 };
    let all = || rows.rows.iter().map(|(_, row)| row);
    let listed = std::iter::successors(rows.evictable.oldest, |slot| rows.row(*slot).links.newer).count();
    assert_eq!((rows.by_id.len(), listed + rows.protected.len()), (rows.rows.len(), rows.rows.len()));
    assert_eq!(rows.bytes, all().map(|row| row.bytes).sum::<usize>());
    let protected = all().filter(|row| row.protected_until.is_some());
    assert_eq!(rows.protected_bytes, protected.map(|row| row.bytes).sum::<usize>());
    assert_eq!(rows.usage().entries.load(Relaxed), rows.rows.len());
    assert_eq!(rows.usage().bytes.load(Relaxed), rows.total());
    assert_eq!(rows.usage().protected_bytes.load(Relaxed), rows.protected_total());
    assert!(rows.total() <= rows.quota.limit(rows.kind), "within the quota");
    let mut by_holder: HashMap<_, Vec<_>> = HashMap::new();
    all().for_each(|row| by_holder.entry(row.holder).or_default().push(row));
    for (holder, own) in by_holder {
        let holder = rows.holders.get(holder);
        let listed = std::iter::successors(holder.evictable.oldest, |slot| rows.row(*slot).own_links.newer);
        let mut listed: Vec<_> = listed.map(|slot| &rows.row(slot).id).collect();
        let is_protected = |row: &&&Row<usize>| row.protected_until.is_some();
        let mut evictable: Vec<_> = own.iter().filter(|row| !is_protected(row)).map(|row| &row.id).collect();
        listed.sort();
        evictable.sort();
        assert_eq!(listed, evictable);
        assert_eq!(holder.bytes, own.iter().map(|row| row.bytes).sum::<usize>());
        let protected = own.iter().filter(is_protected).map(|row| row.bytes).sum::<usize>();
        assert_eq!(holder.protected_bytes, protected);
        let usage = rows.quota.caller(&holder.caller);
        assert!(usage.is_none_or(|usage| usage.own.protected_bytes(rows.kind).load(Relaxed) == protected));
    }
    check_tenants(rows);
    for row in all() {
        let slot = rows.find(row.hash, &row.id).expect("every row can be found");
        assert_eq!(rows.row(slot).id, row.id);
    }
    rows.rows.len()
}

fn check_tenants(rows: &AgentRows<usize>) {
    let mut by_tenant: HashMap<_, Vec<_>> = HashMap::new();
    for (_, row) in &rows.rows {
        let caller = &rows.holders.get(row.holder).caller;
        by_tenant.entry(caller.tenant()).or_default().push((caller, row));
    }
    for (tenant, own) in by_tenant {
        let protected = own.iter().filter(|(_, row)| row.protected_until.is_some());
        let protected = protected.map(|(_, row)| row.bytes).sum::<usize>();
        assert_eq!(rows.holders.protected_bytes_of_tenant(&tenant), protected);
        let usage = rows.quota.caller(own[0].0);
        assert!(usage.is_none_or(|usage| usage.tenant.protected_bytes(rows.kind).load(Relaxed) == protected));
    }
}

fn counts(table: &BoundedTable<usize>, agent: &str) -> (u64, u64) {
    let usage = table.agents[agent].usage();
    (usage.evictions.load(Relaxed), usage.refusals.load(Relaxed))
}

#[test]
fn an_agent_over_its_quota_evicts_its_own_oldest_rows_and_counts_them() {
    let (mut table, now) = (table(1 << 20, 2), Instant::now());
    (0..10).for_each(|id| put(&mut table, "quiet", id, 1000, EVICTABLE, now).unwrap());
    (0..10_000).for_each(|id| put(&mut table, "busy", id, 1000, EVICTABLE, now).unwrap());
    let held = check(&table, "busy");
    assert!((500..1000).contains(&held), "{held}");
    assert!(!holds(&table, "busy", 9_999 - held, now) && holds(&table, "busy", 10_000 - held, now));
    assert_eq!(counts(&table, "busy"), (10_000 - held as u64, 0));
    assert_eq!((check(&table, "quiet"), counts(&table, "quiet")), (10, (0, 0)));
    // A row that is written again becomes the newest.
    put(&mut table, "busy", 10_000 - held, 1000, EVICTABLE, now).unwrap();
    put(&mut table, "busy", 10_000, 1000, EVICTABLE, now).unwrap();
    assert!(holds(&table, "busy", 10_000 - held, now) && !holds(&table, "busy", 10_001 - held, now));
}

#[test]
fn a_protected_row_is_never_evicted_and_without_room_new_rows_are_refused() {
    let (mut table, now) = (table(1 << 20, 2), Instant::now());
    put(&mut table, "b", 0, 1000, PROTECTED, now).unwrap();
    put(&mut table, "a", 0, 1000, PROTECTED, now).unwrap();
    (1..10_000).for_each(|id| put(&mut table, "a", id, 1000, EVICTABLE, now).unwrap());
    (1..7).for_each(|id| put(&mut table, "a", id, 400_000, EVICTABLE, now).unwrap_or_default());
    assert!(holds(&table, "a", 0, now));
    let refused_at = (10_000..).find(|id| put(&mut table, "a", *id, 1000, PROTECTED, now).is_err()).unwrap();
    assert_eq!(check(&table, "a"), refused_at - 10_000 + 1, "all evictable rows made room");
    let (_, refusals) = counts(&table, "a");
    put(&mut table, "a", 1, 1000, EVICTABLE, now).unwrap_err();
    assert_eq!(counts(&table, "a").1, refusals + 1);
    put(&mut table, "b", 1, 1000, PROTECTED, now).expect("another agent has room");
    // What runs can end, and then makes room.
    put(&mut table, "a", 0, 1050, EVICTABLE, now).unwrap();
    put(&mut table, "a", 1, 1000, PROTECTED, now).unwrap();
    assert!(!holds(&table, "a", 0, now));
    check(&table, "a");
}

#[test]
fn the_protection_of_a_row_ends_and_expired_rows_make_room() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let short = Lifetime { ttl: HOUR, protected_for: SECOND };
    let rows = (0..).take_while(|id| put(&mut table, "a", *id, 1000, short, now).is_ok()).count();
    put(&mut table, "a", rows, 1000, PROTECTED, now).unwrap_err();
    put(&mut table, "a", rows, 1000, PROTECTED, now + SECOND).expect("the protection has ended");
    assert_eq!(check(&table, "a"), rows, "one row was evicted");
    (0..rows).for_each(|id| {
        put(&mut table, "a", id, 1000, Lifetime::protected(SECOND), now).unwrap_or_default();
    });
    put(&mut table, "a", 2 * rows, 400_000, EVICTABLE, now + SECOND).expect("all others have expired");
    assert_eq!(table.get("a", "0", now + SECOND), None);
    check(&table, "a");
}

#[test]
fn the_quota_knows_which_protection_has_ended_even_if_nothing_is_written() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let short = Lifetime { ttl: HOUR, protected_for: SECOND };
    (0..EXPIRED_PER_WRITE).for_each(|id| put(&mut table, "a", id, 1000, short, now).unwrap());
    let mut removed = Removed::default();
    let _ = table.entry(&"a".into(), "read", now + SECOND, &mut removed).value();
    assert_eq!(check(&table, "a"), EXPIRED_PER_WRITE);
    // A row that is too large for any table.
    let lapsed = (0..100).take_while(|id| put(&mut table, "a", *id, 1000, short, now).is_ok()).count();
    put(&mut table, "a", lapsed, 2 << 20, PROTECTED, now + SECOND).unwrap_err();
    assert_eq!(check(&table, "a"), lapsed);
    assert_eq!(table.agents["a"].protected_bytes, 0, "the refused write has ended all protections");
}

#[test]
fn one_row_never_evicts_all_others_and_large_rows_leave_reserved_room() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    put(&mut table, "a", 0, 600 << 10, EVICTABLE, now).unwrap_err();
    let quota = table.quotas.agent(&"a".into());
    let calls: Vec<_> =
        (0..500).map(|_| quota.reserve(CallKind::Answer, &Caller::default()).unwrap()).collect();
    put(&mut table, "a", 0, 400 << 10, PROTECTED, now).unwrap_err();
    put(&mut table, "a", 0, 200 << 10, PROTECTED, now).unwrap();
    (1..=500).for_each(|id| put(&mut table, "a", id, 1000, PROTECTED, now).expect("it was reserved"));
    drop(calls);
    check(&table, "a");
}

#[test]
fn large_rows_that_are_protected_leave_a_quarter_for_the_small_ones_of_other_calls() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let rows = (0..).take_while(|id| put(&mut table, "a", *id, 10_000, PROTECTED, now).is_ok()).count();
    assert!((70..80).contains(&rows), "{rows}");
    drop(table.quotas.agent(&"a".into()).reserve(CallKind::Call, &Caller::default()).unwrap());
    put(&mut table, "a", rows, 10_000, EVICTABLE, now).expect("it can be evicted");
}

/// Sweeps to the end; returns the number of steps.
fn sweep_all(table: &mut BoundedTable<usize>, now: Instant) -> usize {
    std::iter::from_fn(|| table.sweep_step(now)).count()
}

#[test]
fn a_sweep_removes_expired_rows_step_by_step_and_frees_their_capacity() {
    let (mut table, now) = (table(64 << 20, 2), Instant::now());
    let rows = 16 * ROWS_PER_STEP;
    for id in 0..rows {
        // Some rows do not expire, at the front and in between; one is written again.
        let ttl = if id % ROWS_PER_STEP == 0 { HOUR } else { SECOND };
        let protected_for = if id % 2 == 0 { ttl } else { Duration::ZERO };
        put(&mut table, "a", id, 1, Lifetime { ttl, protected_for }, now).unwrap();
    }
    put(&mut table, "a", 1, 1, EVICTABLE, now).unwrap();
    (0..rows).for_each(|id| put(&mut table, "b", id, 1, Lifetime::evictable(SECOND), now).unwrap());
    sweep_all(&mut table, now);
    assert_eq!(table.rows(), 2 * rows, "nothing has expired");
    let steps = sweep_all(&mut table, now + SECOND);
    assert!((32..=35).contains(&steps), "{steps}");
    assert_eq!((table.rows(), check(&table, "a"), table.agents.len()), (17, 17, 1));
    assert!(table.agents["a"].rows.capacity() < 200);
    put(&mut table, "a", 2, 1, EVICTABLE, now).unwrap();
    assert_eq!(check(&table, "a"), 18);
}

#[test]
fn a_sweep_continues_after_the_table_has_changed() {
    let (mut table, now) = (table(64 << 20, 1), Instant::now());
    let later = now + SECOND;
    for id in 0..3 * ROWS_PER_STEP {
        put(&mut table, "a", id, 1, Lifetime::protected(SECOND), now).unwrap();
    }
    table.sweep_step(later).unwrap();
    (0..10).for_each(|id| put(&mut table, "a", id, 1, EVICTABLE, later).unwrap());
    sweep_all(&mut table, later);
    assert_eq!((table.rows(), check(&table, "a")), (10, 10));
}

#[test]
fn a_sweep_applies_a_quota_that_has_become_smaller() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    (0..1000).for_each(|id| put(&mut table, "a", id, 400, EVICTABLE, now).unwrap());
    let before = check(&table, "a");
    let _others: Vec<_> = ["b", "c", "d"].map(|name| table.quotas.agent(&name.into())).into();
    sweep_all(&mut table, now);
    assert!(check(&table, "a") < before);
}

/// A table with many rows of agent `a`, whose quota has become smaller.
fn table_over_its_quota(rows: usize, now: Instant) -> (BoundedTable<usize>, Vec<Arc<AgentQuota>>) {
    let mut table = table(64 << 20, 1);
    (0..rows).for_each(|id| put(&mut table, "a", id, 400, EVICTABLE, now).unwrap());
    assert_eq!(check(&table, "a"), rows);
    let others = (0..63).map(|name| table.quotas.agent(&name.to_string().into())).collect();
    (table, others)
}

fn excess(table: &BoundedTable<usize>) -> usize {
    let rows = &table.agents["a"];
    rows.bytes.saturating_sub(rows.quota.limit(rows.kind))
}

#[test]
fn a_write_does_not_pay_for_all_rows_that_exceed_a_smaller_quota() {
    let now = Instant::now();
    let (mut table, _others) = table_over_its_quota(40_000, now);
    let (mut held, mut over) = (table.rows(), excess(&table));
    for id in 0.. {
        put(&mut table, "a", 50_000 + id, 400, EVICTABLE, now).unwrap();
        assert!(table.rows() + 4 >= held, "a small row evicts few others");
        if excess(&table) == 0 {
            break;
        }
        assert!(excess(&table) < over, "every write helps");
        (held, over) = (table.rows(), excess(&table));
    }
    assert!(check(&table, "a") > 1000);
}

#[test]
fn a_large_row_makes_room_in_several_steps() {
    let (mut table, now) = (table(64 << 20, 1), Instant::now());
    (0..100_000).for_each(|id| put(&mut table, "a", id, 400, EVICTABLE, now).unwrap());
    let before = check(&table, "a");
    put(&mut table, "a", 100_000, 16 << 20, EVICTABLE, now).unwrap();
    assert!(check(&table, "a") + 10 * ROWS_PER_STEP < before);
    assert!(holds(&table, "a", 100_000, now));
}

#[test]
fn a_sweep_evicts_step_by_step_what_exceeds_a_smaller_quota() {
    let now = Instant::now();
    let (mut table, _others) = table_over_its_quota(40_000, now);
    while let Some((removed, _)) = table.sweep_step(now) {
        assert!(removed.len() <= ROWS_PER_STEP, "a step is short");
    }
    assert!(check(&table, "a") > 1000);
}

#[test]
fn a_sweep_does_not_move_many_rows_at_once() {
    let (mut table, now) = (table(64 << 20, 1), Instant::now());
    for id in 0..16 * ROWS_PER_STEP {
        let ttl = if id % 8 == 0 { HOUR } else { SECOND };
        put(&mut table, "a", id, 1, Lifetime::evictable(ttl), now).unwrap();
    }
    let capacity = table.agents["a"].rows.capacity();
    let mut later = std::iter::from_fn(|| table.sweep_step(now + SECOND));
    assert!(later.all(|(_, storage)| storage.is_none()), "too many rows remain");
    assert_eq!((check(&table, "a"), table.agents["a"].rows.capacity()), (2 * ROWS_PER_STEP, capacity));
    let storages: Vec<_> =
        std::iter::from_fn(|| table.sweep_step(now + HOUR)).filter_map(|(_, storage)| storage).collect();
    assert_eq!((storages.len(), table.agents.len()), (1, 0), "dropped by the caller, after the lock");
}

#[test]
fn pages_show_every_row_once() {
    let (mut table, now) = (table(64 << 20, 1), Instant::now());
    let rows = 3 * ROWS_PER_STEP;
    (0..rows).for_each(|id| put(&mut table, "a", id, 1, EVICTABLE, now).unwrap());
    let (mut seen, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let (page, next) = table.page("a", at, now);
        assert!(page.len() <= ROWS_PER_STEP);
        seen.extend(page.into_iter().map(|(_, value)| *value));
        from = next;
    }
    seen.sort_unstable();
    assert_eq!(seen, Vec::from_iter(0..rows));
}

#[test]
fn a_row_without_room_grows_by_a_constant_in_all_of_its_writes() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let large = (0..).take_while(|id| put(&mut table, "a", *id, 2000, PROTECTED, now).is_ok()).count();
    (large..).take_while(|id| put(&mut table, "a", *id, 1000, PROTECTED, now).is_ok()).count();
    let full = table.agents["a"].bytes;
    let over = |table: &BoundedTable<usize>| table.agents["a"].bytes - full;
    let mut bytes = 2000;
    while put(&mut table, "a", 0, bytes + 16, PROTECTED, now).is_ok() {
        bytes += 16;
        assert!(over(&table) <= GROWTH, "it grows at every write");
    }
    assert!(over(&table) > 0);
    put(&mut table, "a", 0, bytes - 64, PROTECTED, now).unwrap();
    put(&mut table, "a", 0, bytes, PROTECTED, now).expect("it has shrunk meanwhile");
}

/// Puts rows of a caller until one is refused. Returns how many there was room for.
fn fill(table: &mut BoundedTable<usize>, caller: &Caller, from: usize, bytes: usize, now: Instant) -> usize {
    (0..10_000).take_while(|id| put_for(table, caller, "a", from + id, bytes, PROTECTED, now).is_ok()).count()
}

#[test]
fn a_tenant_that_holds_less_than_others_loses_nothing_to_them() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let [alice, bob] = ["T/alice", "U/bob"].map(Caller::verified);
    (0..100).for_each(|id| put_for(&mut table, &alice, "a", id, 1000, EVICTABLE, now).unwrap());
    for id in 1000..6000 {
        put_for(&mut table, &bob, "a", id, 1000, EVICTABLE, now).unwrap();
        put_for(&mut table, &Caller::default(), "a", id + 10_000, 1000, EVICTABLE, now).unwrap();
    }
    let held = check(&table, "a");
    assert!((0..100).all(|id| holds(&table, "a", id, now)), "alice holds less than the others");
    let of_bob = (1000..6000).filter(|id| holds(&table, "a", *id, now)).count();
    assert!(of_bob.abs_diff((held - 100) / 2) <= 2, "the others share the rest: {of_bob} of {held}");
    // A row stays with the caller that wrote it first, whoever writes it again.
    (0..100).for_each(|id| put_for(&mut table, &bob, "a", id, 1000, EVICTABLE, now).unwrap());
    (6000..9000).for_each(|id| put_for(&mut table, &bob, "a", id, 1000, EVICTABLE, now).unwrap());
    assert!((0..100).all(|id| holds(&table, "a", id, now)));
    check(&table, "a");
}

#[test]
fn a_caller_that_holds_less_than_others_of_its_tenant_loses_nothing_to_them() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
    (0..100).for_each(|id| put_for(&mut table, &alice, "a", id, 1000, EVICTABLE, now).unwrap());
    (1000..6000).for_each(|id| put_for(&mut table, &bob, "a", id, 1000, EVICTABLE, now).unwrap());
    check(&table, "a");
    assert!((0..100).all(|id| holds(&table, "a", id, now)), "alice holds less than bob");
}

#[test]
fn a_tenant_with_many_users_evicts_nothing_of_a_tenant_that_holds_less() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let alice = Caller::verified("T/alice");
    (0..100).for_each(|id| put_for(&mut table, &alice, "a", id, 1000, EVICTABLE, now).unwrap());
    for id in 1000..6000 {
        let user = Caller::verified(&format!("U/user{}", id % 200));
        put_for(&mut table, &user, "a", id, 1000, EVICTABLE, now).unwrap();
    }
    check(&table, "a");
    assert!(
        (0..100).all(|id| holds(&table, "a", id, now)),
        "each user holds less than alice, all together more"
    );
}

#[test]
fn protected_rows_of_a_verified_caller_leave_room_for_others() {
    // Calls reserve no room for idempotency keys.
    let quotas = Quotas::new(0);
    let (mut table, now) = (BoundedTable::new(&quotas, QuotaKind::IdempotencyKey), Instant::now());
    let [alice, bob, shared] = [Caller::verified("T"), Caller::verified("U"), Caller::default()];
    let of_alice = fill(&mut table, &alice, 0, 100, now);
    let of_bob = fill(&mut table, &bob, 10_000, 100, now);
    let of_shared = fill(&mut table, &shared, 20_000, 100, now);
    assert!(of_alice > of_bob && of_bob > of_alice / 3, "{of_alice} {of_bob}");
    assert!(of_shared >= of_bob - 5, "{of_bob} {of_shared}");
    assert_eq!(counts(&table, "a"), (0, 3), "refused, nothing evicted");
    check(&table, "a");
    // What waits can always be written again.
    put_for(&mut table, &alice, "a", 0, 100, PROTECTED, now).unwrap();
    // Rows that have ended make room for protected ones, those of the largest caller first.
    (0..of_alice).for_each(|id| put_for(&mut table, &alice, "a", id, 100, EVICTABLE, now).unwrap());
    assert!(fill(&mut table, &bob, 30_000, 100, now) > 0);
    assert!((10_000..10_000 + of_bob).all(|id| holds(&table, "a", id, now)));
    check(&table, "a");
}

#[test]
fn small_rows_of_calls_have_room_that_the_call_reserved() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    let alice = Caller::verified("T/alice");
    // More than a half, which is the share of one caller: the reservation decides.
    let held = fill(&mut table, &alice, 0, 1000, now);
    let bytes = table.agents["a"].protected_bytes;
    assert!(bytes > (1 << 20) * 9 / 10, "{held} rows of {bytes} bytes");
    // Large rows have no reservation.
    assert_eq!(put_for(&mut table, &alice, "a", held, 100_000, PROTECTED, now), Err(Full));
}

#[test]
fn callers_without_rows_take_no_memory() {
    let (mut table, now) = (table(1 << 20, 1), Instant::now());
    for id in 0..5000 {
        let caller = Caller::verified(&format!("T/{id}"));
        put_for(&mut table, &caller, "a", id, 100, EVICTABLE, now).unwrap();
    }
    let held = check(&table, "a");
    let rows = &table.agents["a"];
    assert!(rows.holders.overhead > held * 200, "the callers themselves count: {}", rows.holders.overhead);
    let later = now + 2 * HOUR;
    while table.sweep_step(later).is_some() {}
    put(&mut table, "a", 0, 100, EVICTABLE, later).unwrap();
    assert_eq!(table.agents["a"].holders.overhead, 0);
}

#[test]
fn compaction_keeps_the_callers_of_rows() {
    let (mut table, now) = (table(8 << 20, 1), Instant::now());
    let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
    let short = Lifetime { ttl: SECOND, protected_for: Duration::ZERO };
    (0..2000).for_each(|id| put_for(&mut table, &alice, "a", id, 100, short, now).unwrap());
    for (number, caller) in [&alice, &bob, &alice, &bob].into_iter().enumerate() {
        let lifetime = if number < 2 { PROTECTED } else { EVICTABLE };
        put_for(&mut table, caller, "a", 5000 + number, 100, lifetime, now).unwrap();
    }
    let capacity = table.agents["a"].rows.capacity();
    while table.sweep_step(now + 2 * SECOND).is_some() {}
    assert!(table.agents["a"].rows.capacity() < capacity);
    assert_eq!(check(&table, "a"), 4);
}
