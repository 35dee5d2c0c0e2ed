//! Conformance cases of the store and of domain numbers.

use std::time::{Duration, Instant};

use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenstore::{ErrorName, NodeAccess, Permission, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::bench::{Bench, Stop, Verdict, require, same};

/// Maximum time of an event.
const SOON: Duration = Duration::from_secs(60);

/// Time without an event after which a watch counts as quiet.
const A_WHILE: Duration = Duration::from_millis(50);

/// Domain that permissions do not restrict.
const PRIVILEGED: DomId = DomId(0);

/// Checks that the store refused with this error.
fn refused<T>(outcome: Result<T, StoreError>, error: ErrorName, what: &str) -> Verdict {
    match outcome {
        Ok(_) => Err(Stop::Failed(format!("{what} was not refused"))),
        Err(found) if found.refusal() == Some(error) => Ok(()),
        Err(found) => Err(Stop::Failed(format!("{what}: {found}, where {error} is due"))),
    }
}

/// Returns permissions: an owner without access for others, except `access` for `whom`.
fn shared_with(owner: DomId, whom: DomId, access: NodeAccess) -> Verdict<PermissionList> {
    let owner = Permission { access: NodeAccess::None, domain: owner };
    PermissionList::new(&[owner, Permission { access, domain: whom }]).map_err(Stop::failed)
}

pub(super) mod domain_numbers_name_the_domain {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        both(bench)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        both(bench)
    }

    fn both<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let own = bench.platform.domid();
        require!(own < DomId::FIRST_RESERVED, "{own} is a reserved number");
        require!(own != bench.peer, "both halves run in domain {own}");
        let path = bench.talk.store.domain_path(own)?;
        require!(path == format!("/local/domain/{own}"), "the home of {own} is {path:?}");
        bench.talk.say("number", own)?;
        let peer: u16 = bench.talk.hear_number("number")?;
        require!(DomId(peer) == bench.peer, "the other half runs in {peer}, not {}", bench.peer);
        // A path without a leading slash is relative to the home of the connection's domain.
        let relative = bench.talk.store.read_text("data/conformance/hello")?;
        let absolute = bench.talk.store.read_text(&format!("{}/hello", bench.talk.own))?;
        require!(relative == absolute, "{relative:?} by the relative path, {absolute:?} else");
        Ok(())
    }
}

pub(super) mod what_one_writes_the_other_reads {
    use super::*;

    /// Returns values of any bytes, from an empty one to one longer than a line.
    fn values() -> [Vec<u8>; 4] {
        let all = (0..=255).cycle().take(2000).collect();
        [Vec::new(), b"text".to_vec(), b"a\0b\nc\xFF".to_vec(), all]
    }

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = format!("{}/values", bench.talk.own);
        for (number, value) in values().iter().enumerate() {
            bench.talk.store.write(&format!("{dir}/below/{number}"), value)?;
        }
        bench.talk.say("written", dir.clone())?;
        bench.talk.hear("read")?;
        bench.talk.store.rm(&dir)?;
        let gone = bench.talk.store.read_opt(&format!("{dir}/below/1"))?;
        require!(gone.is_none(), "a value is left of what was removed");
        bench.talk.say("removed", "all")
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = bench.talk.hear("written")?;
        for (number, value) in values().iter().enumerate() {
            let found = bench.talk.store.read(&format!("{dir}/below/{number}"))?;
            same(&found, value, &format!("value {number}"))?;
        }
        let mut names = bench.talk.store.directory(&format!("{dir}/below"))?;
        names.sort_unstable();
        require!(names == ["0", "1", "2", "3"], "the listing is {names:?}");
        let nothing = bench.talk.store.read_opt(&format!("{dir}/below/nothing"))?;
        require!(nothing.is_none(), "a value where none was written");
        bench.talk.say("read", "all")?;
        bench.talk.hear("removed")?;
        let gone = bench.talk.store.read_opt(&format!("{dir}/below/1"))?;
        require!(gone.is_none(), "a value is left of what was removed");
        Ok(())
    }
}

pub(super) mod permissions_hold {
    use super::*;

    /// Creates a secret, and a node that the other half may write.
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let (own, peer) = (bench.platform.domid(), bench.peer);
        let (secret, shared) =
            (format!("{}/secret", bench.talk.own), format!("{}/shared", bench.talk.own));
        let store = &mut bench.talk.store;
        store.write(&secret, "1")?;
        store.set_perms(&secret, &PermissionList::owned_by(own, NodeAccess::None))?;
        store.write(&shared, "1")?;
        let list = shared_with(own, peer, NodeAccess::Both)?;
        store.set_perms(&shared, &list)?;
        require!(store.get_perms(&shared)? == list, "the permissions are others than were set");
        bench.talk.say("ready", "both")?;
        bench.talk.hear("done")?;
        let found = bench.talk.store.read(&shared)?;
        same(&found, b"by the user", "the node that the user may write")?;
        same(&bench.talk.store.read(&secret)?, b"1", "the secret")?;
        bench.talk.store.rm(&shared)?;
        Ok(bench.talk.store.rm(&secret)?)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        bench.talk.hear("ready")?;
        let (secret, shared) =
            (format!("{}/secret", bench.talk.theirs), format!("{}/shared", bench.talk.theirs));
        let own = bench.platform.domid();
        let store = &mut bench.talk.store;
        store.write(&shared, "by the user")?;
        if own != PRIVILEGED {
            refused(store.read(&secret), ErrorName::Access, "reading the secret")?;
            refused(store.write(&secret, "2"), ErrorName::Access, "writing the secret")?;
            refused(store.rm(&secret), ErrorName::Access, "removing the secret")?;
            let mine = PermissionList::owned_by(own, NodeAccess::Both);
            for node in [&secret, &shared] {
                let taken = store.set_perms(node, &mine);
                require!(taken.is_err(), "the user gave itself {node}");
            }
        }
        bench.talk.say("done", "all")
    }
}

pub(super) mod nobody_writes_below_another {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        both(bench)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        both(bench)
    }

    fn both<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        if bench.platform.domid() != PRIVILEGED {
            let home = format!("/local/domain/{}", bench.peer);
            let theirs = bench.talk.theirs.clone();
            let store = &mut bench.talk.store;
            for path in [format!("{theirs}/hello"), format!("{theirs}/new"), format!("{home}/new")]
            {
                refused(store.write(&path, "x"), ErrorName::Access, &format!("writing {path}"))?;
                refused(store.rm(&path), ErrorName::Access, &format!("removing {path}"))?;
            }
            refused(store.mkdir("/local/domain/new"), ErrorName::Access, "a domain of its own")?;
            refused(store.write("/new", "x"), ErrorName::Access, "a node at the root")?;
        }
        bench.talk.both_at("tried")?;
        let hello = bench.talk.store.read_opt(&format!("{}/hello", bench.talk.own))?;
        require!(hello.is_some(), "what the other half removed is gone");
        Ok(())
    }
}

/// Reads events until the one for `path` arrives.
fn await_path(store: &mut StoreClient, path: &str, token: &str) -> Verdict {
    let deadline = Instant::now() + SOON;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        if let Some(event) = store.wait_event(left)? {
            require!(event.token == token, "an event of watch {:?}", event.token);
            if event.path == path {
                return Ok(());
            }
        }
    }
    Err(Stop::Failed(format!("no event for {path} within {SOON:?}")))
}

pub(super) mod a_watch_tells_of_changes {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = format!("{}/watched", bench.talk.own);
        bench.talk.store.mkdir(&dir)?;
        bench.talk.say("dir", &dir)?;
        bench.talk.hear("watching")?;
        bench.talk.store.write(&format!("{dir}/a/b"), "1")?;
        bench.talk.hear("heard-write")?;
        bench.talk.store.rm(&format!("{dir}/a"))?;
        bench.talk.hear("heard-removal")?;
        bench.talk.store.write(&format!("{dir}-not"), "1")?;
        bench.talk.hear("unwatched")?;
        bench.talk.store.write(&format!("{dir}/c"), "1")?;
        bench.talk.say("written", "after that")?;
        bench.talk.hear("done")?;
        bench.talk.store.rm(&format!("{dir}-not"))?;
        Ok(bench.talk.store.rm(&dir)?)
    }

    /// Uses a separate connection, so that events of the dialogue do not interfere.
    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = bench.talk.hear("dir")?;
        let mut store = bench.platform.store()?;
        store.watch(&dir, "a token")?;
        await_path(&mut store, &dir, "a token")?;
        let twice = store.watch(&dir, "a token");
        refused(twice, ErrorName::Exists, "the same watch again")?;
        bench.talk.say("watching", "yes")?;
        await_path(&mut store, &format!("{dir}/a/b"), "a token")?;
        bench.talk.say("heard-write", "yes")?;
        await_path(&mut store, &format!("{dir}/a"), "a token")?;
        bench.talk.say("heard-removal", "yes")?;
        let other = store.wait_event(A_WHILE)?;
        require!(other.is_none(), "an event for what is not watched: {other:?}");
        store.unwatch(&dir, "a token")?;
        bench.talk.say("unwatched", "yes")?;
        bench.talk.hear("written")?;
        let late = store.wait_event(A_WHILE)?;
        require!(late.is_none(), "an event after the watch was undone: {late:?}");
        bench.talk.say("done", "yes")
    }
}

pub(super) mod a_transaction_is_all_or_nothing {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = format!("{}/transaction", bench.talk.own);
        bench.talk.store.write(&format!("{dir}/kept"), "1")?;
        // A second connection observes the transaction from outside.
        let mut outside = bench.platform.store()?;
        let given_up: Result<(), StoreError> = bench.talk.store.transaction(|inside| {
            inside.write(&format!("{dir}/kept"), "2")?;
            inside.write(&format!("{dir}/new"), "2")?;
            let seen = inside.read(&format!("{dir}/new"))?;
            let unseen = outside.read_opt(&format!("{dir}/new"))?;
            if seen != b"2" || unseen.is_some() {
                return Err(StoreError::NotText { path: "seen too early, or not at all".into() });
            }
            Err(StoreError::Closed)
        });
        require!(given_up == Err(StoreError::Closed), "what was given up came to {given_up:?}");
        same(&outside.read(&format!("{dir}/kept"))?, b"1", "after it was given up")?;
        let new = outside.read_opt(&format!("{dir}/new"))?;
        require!(new.is_none(), "something is left of what was given up");
        bench.talk.store.transaction(|inside| {
            inside.write(&format!("{dir}/kept"), "3")?;
            inside.write(&format!("{dir}/new"), "3")
        })?;
        for name in ["kept", "new"] {
            same(&outside.read(&format!("{dir}/{name}"))?, b"3", "after it was committed")?;
        }
        bench.talk.say("committed", &dir)?;
        bench.talk.hear("seen")?;
        Ok(bench.talk.store.rm(&dir)?)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let dir = bench.talk.hear("committed")?;
        same(&bench.talk.store.read(&format!("{dir}/new"))?, b"3", "seen by the other domain")?;
        bench.talk.say("seen", "yes")
    }
}

pub(super) mod a_conflict_is_done_again {
    use super::*;

    const ROUNDS: u32 = 50;

    /// Increments one node from both halves in transactions; no increment may be lost.
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let counter = format!("{}/counter", bench.talk.own);
        let list = shared_with(bench.platform.domid(), bench.peer, NodeAccess::Both)?;
        bench.talk.store.write(&counter, "0")?;
        bench.talk.store.set_perms(&counter, &list)?;
        bench.talk.say("counter", &counter)?;
        conflicts_once(bench)?;
        count(&mut bench.talk.store, &counter)?;
        bench.talk.hear("counted")?;
        let total = bench.talk.store.read_u32(&counter)?;
        require!(total == 2 * ROUNDS, "twice {ROUNDS} times one made {total}");
        Ok(bench.talk.store.rm(&counter)?)
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let counter = bench.talk.hear("counter")?;
        count(&mut bench.talk.store, &counter)?;
        bench.talk.say("counted", ROUNDS)
    }

    fn count(store: &mut StoreClient, counter: &str) -> Verdict {
        for _ in 0..ROUNDS {
            store.transaction(|inside| {
                let so_far = inside.read_u32(counter)?;
                inside.write(counter, (so_far + 1).to_string())
            })?;
        }
        Ok(())
    }

    /// Checks that a concurrent write from outside makes the transaction fail once.
    fn conflicts_once<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let node = format!("{}/conflict", bench.talk.own);
        bench.talk.store.write(&node, "10")?;
        let mut outside = bench.platform.store()?;
        let mut attempts = 0;
        bench.talk.store.transaction(|inside| {
            attempts += 1;
            let found = inside.read_u32(&node)?;
            if attempts == 1 {
                outside.write(&node, "20")?;
            }
            inside.write(&node, (found + 1).to_string())
        })?;
        require!(attempts == 2, "a transaction with a conflict was done {attempts} times");
        same(&outside.read(&node)?, b"21", "after the conflict")?;
        Ok(bench.talk.store.rm(&node)?)
    }
}
