//! Conformance cases of event channels.

// #syscall none: for tests

use std::time::{Duration, Instant};

use ringfence_platform::{Channel, ChannelError, EventPort, Platform};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bench::{Bench, Stop, Verdict, require};

/// Maximum time of a notification.
const SOON: Duration = Duration::from_secs(60);

/// Time without an event after which a channel counts as quiet.
const A_WHILE: Duration = Duration::from_millis(50);

/// Returns `true` if the channel becomes readable within `timeout`.
fn readable(channel: &impl Channel, timeout: Duration) -> Verdict<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(Stop::failed)?;
        match poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Stop::failed(errno)),
        }
    }
}

/// Waits until the channel is pending, and clears it.
fn await_event(channel: &impl Channel, what: &str) -> Verdict {
    require!(readable(channel, SOON)?, "{what}: no event within {SOON:?}");
    require!(channel.clear()?, "{what}: readable, but not pending");
    Ok(())
}

/// Checks that nothing is pending and no event arrives.
fn stays_quiet(channel: &impl Channel, what: &str) -> Verdict {
    require!(!channel.clear()?, "{what}: pending");
    require!(!readable(channel, A_WHILE)?, "{what}: readable, though it was cleared");
    Ok(())
}

/// Clears the one event that an earlier notification may still cause (on Xen: one that arrived while
/// the port was masked).
fn settle(channel: &impl Channel) -> Verdict {
    if readable(channel, A_WHILE)? {
        channel.clear()?;
    }
    Ok(())
}

/// Returns the lender's end of a channel that the user has bound, with nothing pending.
fn allocated<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict<P::Channel> {
    let channel = bench.platform.alloc_unbound(bench.peer)?;
    bench.talk.say("port", channel.port().0)?;
    bench.talk.hear("bound")?;
    // Binding may make this end pending too; the contract covers only the other end.
    channel.clear()?;
    Ok(channel)
}

/// Returns the user's end of the channel, with nothing pending.
fn bound<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict<P::Channel> {
    let channel = bind_announced(bench)?;
    await_event(&channel, "just bound")?;
    bench.talk.say("bound", channel.port().0)?;
    Ok(channel)
}

/// Binds the port that the lender announced.
fn bind_announced<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict<P::Channel> {
    let port = EventPort(bench.talk.hear_number("port")?);
    Ok(bench.platform.bind_interdomain(bench.peer, port)?)
}

pub(super) mod a_bound_channel_is_pending_once {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bench.platform.alloc_unbound(bench.peer)?;
        stays_quiet(&channel, "an end that nobody bound")?;
        bench.talk.say("port", channel.port().0)?;
        bench.talk.hear("done")?;
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bind_announced(bench)?;
        await_event(&channel, "just bound")?;
        stays_quiet(&channel, "cleared after binding")?;
        bench.talk.say("done", "once")
    }
}

pub(super) mod notifications_merge {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = allocated(bench)?;
        for round in 0..3 {
            for _ in 0..100 {
                channel.notify()?;
            }
            bench.talk.say(&format!("sent-{round}"), 100)?;
            bench.talk.hear(&format!("quiet-{round}"))?;
        }
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bound(bench)?;
        for round in 0..3 {
            bench.talk.hear(&format!("sent-{round}"))?;
            await_event(&channel, "after 100 notifications")?;
            settle(&channel)?;
            stays_quiet(&channel, "after 100 notifications were cleared")?;
            bench.talk.say(&format!("quiet-{round}"), "yes")?;
        }
        Ok(())
    }
}

pub(super) mod both_ends_notify {
    use super::*;

    const ROUNDS: usize = 200;

    /// Checks a ping-pong between the ends: a lost event would stop it.
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = allocated(bench)?;
        for round in 0..ROUNDS {
            channel.notify()?;
            await_event(&channel, &format!("answer {round}"))?;
        }
        bench.talk.both_at("end")?;
        stays_quiet(&channel, "after the last answer")?;
        // Both ends stay open until both halves have finished.
        bench.talk.both_at("looked")
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bound(bench)?;
        for round in 0..ROUNDS {
            await_event(&channel, &format!("call {round}"))?;
            channel.notify()?;
        }
        bench.talk.both_at("end")?;
        stays_quiet(&channel, "after the last call")?;
        bench.talk.both_at("looked")
    }
}

pub(super) mod a_storm_is_cleared_in_bounded_time {
    use super::*;

    const STORM: usize = 20_000;

    /// Maximum number of clears after any number of notifications.
    const CLEARS: usize = 8;

    /// Checks that a notification never blocks if the other end does not clear (XSA-391).
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = allocated(bench)?;
        let begun = Instant::now();
        for _ in 0..STORM {
            channel.notify()?;
        }
        let took = begun.elapsed();
        require!(took < 4 * SOON, "{STORM} notifications took {took:?}");
        bench.talk.say("sent", STORM)?;
        bench.talk.hear("quiet")?;
        channel.notify()?;
        bench.talk.hear("heard")?;
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bound(bench)?;
        bench.talk.hear("sent")?;
        await_event(&channel, "after the storm")?;
        let mut clears = 1;
        while channel.clear()? {
            clears += 1;
            require!(clears <= CLEARS, "still pending after clearing {clears} times");
        }
        stays_quiet(&channel, "after the storm was cleared")?;
        bench.talk.say("quiet", clears)?;
        await_event(&channel, "the first notification after the storm")?;
        bench.talk.say("heard", "it")
    }
}

pub(super) mod a_channel_is_bound_once {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = allocated(bench)?;
        bench.talk.hear("refused")?;
        channel.notify()?;
        bench.talk.hear("notified")?;
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let port = EventPort(bench.talk.hear_number("port")?);
        let channel = bench.platform.bind_interdomain(bench.peer, port)?;
        await_event(&channel, "just bound")?;
        let again = bench.platform.bind_interdomain(bench.peer, port);
        require!(again.is_err(), "port {} was bound twice", port.0);
        // The end that binding created cannot be bound either.
        let own = bench.platform.bind_interdomain(bench.platform.domid(), channel.port());
        require!(own.is_err(), "an end that is bound was bound");
        bench.talk.say("bound", channel.port().0)?;
        bench.talk.say("refused", "twice")?;
        await_event(&channel, "after the attempts")?;
        bench.talk.say("notified", "still")
    }
}

pub(super) mod a_foreign_channel_is_refused {
    use super::*;

    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        // Channels for a third domain and for this one, not for the user.
        let whom = bench.third.unwrap_or(bench.platform.domid());
        let channel = bench.platform.alloc_unbound(whom)?;
        bench.talk.say("port", channel.port().0)?;
        bench.talk.hear("refused")?;
        stays_quiet(&channel, "a channel that another tried to bind")
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let port = EventPort(bench.talk.hear_number("port")?);
        let foreign = bench.platform.bind_interdomain(bench.peer, port);
        require!(foreign.is_err(), "another's channel was bound");
        for port in [0, 1_000_000, u32::MAX].map(EventPort) {
            let none = bench.platform.bind_interdomain(bench.peer, port);
            require!(none.is_err(), "port {} was bound, which is none", port.0);
        }
        bench.talk.say("refused", "all")
    }
}

pub(super) mod a_closed_channel_is_noticed {
    use super::*;

    /// Checks the lender's end after the user closed its own: an error, or no event. (Xen unbinds this
    /// end and drops its notifications.)
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = allocated(bench)?;
        bench.talk.say("ready", "for the end")?;
        bench.talk.hear("closed")?;
        let deadline = Instant::now() + 4 * A_WHILE;
        while Instant::now() < deadline {
            for outcome in [channel.notify(), channel.clear().map(drop)] {
                match outcome {
                    Err(ChannelError::PeerGone) => return Ok(()),
                    Err(other) => return Err(other.into()),
                    Ok(()) => {}
                }
            }
            readable(&channel, A_WHILE)?;
        }
        stays_quiet(&channel, "a channel whose other end was closed")?;
        Err(Stop::skipped("the platform does not tell of a closed channel"))
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        let channel = bound(bench)?;
        bench.talk.hear("ready")?;
        drop(channel);
        bench.talk.say("closed", "the user's end")
    }
}

pub(super) mod closed_channels_make_room {
    use super::*;

    const ROUNDS: usize = 200;

    /// Checks that repeated binding and closing, as by a restarting device, uses up no channels.
    pub(in super::super) fn lender<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        for round in 0..ROUNDS {
            let channel = bench.platform.alloc_unbound(bench.peer)?;
            bench
                .talk
                .say(&format!("port-{}", round % 2), format!("{round} {}", channel.port().0))?;
            let bound = bench.talk.hear_from(&format!("bound-{}", round % 2), round)?;
            require!(bound == "yes", "round {round}: {bound}");
        }
        Ok(())
    }

    pub(in super::super) fn user<P: Platform>(bench: &mut Bench<'_, P>) -> Verdict {
        for round in 0..ROUNDS {
            let port = bench.talk.hear_from(&format!("port-{}", round % 2), round)?;
            let port = EventPort(port.parse().map_err(Stop::failed)?);
            let channel = bench.platform.bind_interdomain(bench.peer, port)?;
            await_event(&channel, "just bound")?;
            bench.talk.say(&format!("bound-{}", round % 2), format!("{round} yes"))?;
        }
        Ok(())
    }
}
