//! `ringfence wait`: waits until a guest runs, or until a process in it listens at a port.
//!
//! A guest is found once its launcher listens for clients, which is when its network is up and its command starts. The
//! launcher wakes this command then ([`GuestWatch`]). The kernel reports no event when a process begins to listen, so
//! the guest's init is asked for its ports at intervals.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use ringfence_guest::ListeningPorts;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::{ChannelError, STATUS_FAILED};
use ringfence_sys::poll::{wait_hung_up, wait_readable};

use super::find::{self, Found, Listing};
use super::{Reply, Request};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::guest_watch::GuestWatch;
use ringfence_hostnet::runtime_dir::RuntimeDir;

/// Exit status if the guest was not ready within the time limit, or has ended.
const STATUS_NOT_READY: u8 = 1;
/// Time limit for the answer of a guest.
const ANSWER: Duration = Duration::from_secs(5);
/// Interval between two questions for ports, at first and at most.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// Interval between two searches for the guest, with and without a watch.
const SEARCHES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(100));

const NOTES: &str = "\
Examples:
  Start a web server, and use it once it answers:
    ringfence run --name web -p 127.0.0.1:8080:8000 -- python3 -m http.server &
    ringfence wait web --for port 8000
    curl http://127.0.0.1:8080/

Exit status:
  0 once the guest is ready; 1 if it was not ready within the time limit, or ended before; 125 if
  Ringfence itself failed, and for errors of usage.";

/// Wait until a guest runs, or until a process in it listens at a port
///
/// The guest need not exist yet.
#[derive(Debug, Args)]
#[command(after_help = NOTES, override_usage = "ringfence wait [OPTIONS] <GUEST>")]
pub struct WaitArgs {
    /// Name of the guest, or PID of its `ringfence run`
    #[arg(value_name = "GUEST", required_unless_present = "condition")]
    pub guest: Option<String>,

    /// Condition: `network`, the guest's network is up and its command starts; `port N`, a process in the guest
    /// listens at TCP port N, at any address [default: network]
    #[arg(long = "for", value_name = "network|port N", num_args = 1..=2)]
    pub condition: Vec<String>,

    /// Seconds to wait
    #[arg(long, value_name = "SECONDS", default_value = "30",
          value_parser = clap::value_parser!(u32).range(0..=86400))]
    pub timeout: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Network,
    /// A process in it listens at this TCP port.
    Port(u16),
}

impl WaitArgs {
    /// Returns guest and condition. The guest may be the word behind `--for network`.
    fn parse(&self) -> Result<(&str, Condition), String> {
        let words: Vec<&str> = self.condition.iter().map(String::as_str).collect();
        let (condition, guest) = match words[..] {
            [] | ["network"] => (Condition::Network, None),
            ["network", guest] => (Condition::Network, Some(guest)),
            ["port", number] => match number.parse() {
                Ok(port @ 1..) => (Condition::Port(port), None),
                _ => return Err(format!("`{number}` is no TCP port: 1 to 65535")),
            },
            ["port"] => return Err("--for port needs a number: --for port 8000".to_owned()),
            _ => return Err(format!("--for {}: `network` or `port N`", words.join(" "))),
        };
        match (self.guest.as_deref(), guest) {
            (Some(guest), None) | (None, Some(guest)) => Ok((guest, condition)),
            (Some(_), Some(other)) => Err(format!("--for network {other}: one guest, please")),
            (None, None) => Err("no guest is named: ringfence wait GUEST".to_owned()),
        }
    }
}

/// Waits for the guest. Returns the exit status.
pub fn main(args: &WaitArgs) -> u8 {
    let deadline = Instant::now() + Duration::from_secs(args.timeout.into());
    let waited = match args.parse() {
        Ok((guest, condition)) => wait(guest, condition, deadline),
        Err(why) => Err(anyhow::Error::msg(why)),
    };
    match waited {
        Ok(None) => 0,
        Ok(Some(seen)) => {
            eprintln!("ringfence: wait: {seen}");
            STATUS_NOT_READY
        }
        Err(error) => {
            eprintln!("ringfence: wait: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

/// Waits until the condition holds. Returns what was seen instead if it does not hold at the deadline.
fn wait(guest: &str, condition: Condition, deadline: Instant) -> anyhow::Result<Option<String>> {
    let Some(found) = search(guest, deadline)? else {
        let Listing { found, silent } = find::all()?;
        let names: Vec<String> = found.into_iter().map(|found| found.guest.name).collect();
        let mut others = match names.as_slice() {
            [] => "you have no guests".to_owned(),
            names => format!("your guests: {}", names.join(", ")),
        };
        silent.iter().for_each(|silent| others.push_str(&format!("; {silent}")));
        return Ok(Some(format!("no guest called `{guest}` came up in time; {others}")));
    };
    match condition {
        Condition::Network => Ok(None),
        Condition::Port(port) => wait_for_port(guest, &found, port, deadline),
    }
}

/// Waits until the guest runs. Returns `None` at the deadline.
fn search(guest: &str, deadline: Instant) -> anyhow::Result<Option<Found>> {
    let directory = RuntimeDir::open()?;
    let watch = directory.watch_guests().ok();
    loop {
        watch.iter().for_each(GuestWatch::clear);
        if let Some(found) = find::at_most_one(guest)? {
            return Ok(Some(found));
        }
        let now = Instant::now();
        if now >= deadline {
            return Ok(None);
        }
        let left = deadline - now;
        match &watch {
            Some(watch) => {
                wait_readable(watch, Some(left.min(SEARCHES.0))).context("waiting for guests")?;
            }
            None => std::thread::sleep(left.min(SEARCHES.1)),
        }
    }
}

/// Waits until a process listens at the port. Returns what was seen instead if none does at the deadline.
fn wait_for_port(
    guest: &str,
    found: &Found,
    port: u16,
    deadline: Instant,
) -> anyhow::Result<Option<String>> {
    let ended =
        || Ok(Some(format!("`{guest}` ended before a process in it listened at port {port}")));
    let (mut interval, longest) = INTERVALS;
    loop {
        let Some(ports) = listening(guest, &found.channel, port)? else { return ended() };
        if ports.has_wanted {
            return Ok(None);
        }
        let now = Instant::now();
        if now >= deadline {
            let seen = match ports.lowest.as_slice() {
                [] => "nothing in it listens at a TCP port".to_owned(),
                others => format!(
                    "it listens at {}",
                    others.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
                ),
            };
            return Ok(Some(format!("`{guest}` does not listen at port {port} yet: {seen}")));
        }
        if wait_hung_up(&found.channel, interval.min(deadline - now))? {
            return ended();
        }
        interval = longest.min(interval * 2);
    }
}

/// Asks for the ports at which processes of the guest listen. Returns `None` if it has ended.
fn listening(guest: &str, launcher: &Channel, port: u16) -> anyhow::Result<Option<ListeningPorts>> {
    let answer = launcher.send(&Request::Listening(port), &[]);
    match answer.and_then(|()| launcher.receive_within(ANSWER)) {
        Ok((Reply::Listening(ports), _)) => Ok(Some(ports)),
        Err(ChannelError::Closed) => Ok(None),
        Ok(_) => bail!("{guest} is of another version of Ringfence"),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: WaitArgs,
    }

    fn parse(line: &str) -> Result<(String, Condition), String> {
        let words = ["wait"].into_iter().chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        line.args.parse().map(|(guest, condition)| (guest.to_owned(), condition))
    }

    #[test]
    fn condition_may_come_before_or_after_the_guest() {
        let web = |condition| Ok(("web".to_owned(), condition));
        for line in ["web", "web --for network", "--for network web", "--for network -- web"] {
            assert_eq!(parse(line), web(Condition::Network), "{line}");
        }
        for line in ["web --for port 80", "--for port 80 web", "--timeout 1 --for port 80 web"] {
            assert_eq!(parse(line), web(Condition::Port(80)), "{line}");
        }
    }

    #[test]
    fn unknown_condition_or_missing_guest_is_refused() {
        for (line, why) in [
            ("", "required"),
            ("--for network", "no guest"),
            ("web --for rain", "`network` or `port N`"),
            ("web --for port", "needs a number"),
            ("web --for port 0", "1 to 65535"),
            ("web --for port 65536", "1 to 65535"),
            ("web --for network other", "one guest"),
            ("web --timeout soon", "--timeout"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
