//! `ringfence top`: rates of guests, their devices and uplinks, of fronts and of driver domains, as a live view, as tables or
//! as JSON.
//!
//! ```text
//!  collector thread                                 main thread
//!    launchers, daemon, sessions ── sample ──────>  View: rates, order, filter ── draw ──> Screen
//!    (collect)                                      App: state              <── keys ──
//! ```
//!
//! The collector waits for the sources, so keys are handled while one of them does not answer. The view asks for the same
//! records as `ringfence ps` and `ringfence status`. A signal ends it, and it restores the terminal.

mod app;
mod collect;
mod columns;
mod draw;
mod model;
mod sample;
mod screen;

use std::io::{self, IsTerminal, Write as _};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use clap::Args;
use ratatui_core::terminal::Terminal;
use ringfence_base::json::escape_controls;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::text::printable;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::{Ending, STATUS_FAILED};
use ringfence_sys::mailbox::{MailSender, mailbox};
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use app::App;
use collect::Collector;
use draw::{Table, Theme};
use model::{Sort, View};
use sample::{Kind, Sample};
use screen::Screen;

/// Most time until the first rates of the live view.
const FIRST: Duration = Duration::from_millis(500);

const NOTES: &str = "\
Examples:
  The guests of `ringfence run`, those of `ringfence serve` if it runs and you are root:
    ringfence top

  A pasta and a passt that were started with --status-socket:
    ringfence top --socket /run/user/1000/web.status --socket /run/user/1000/vm.status

  The guests with drops in ten seconds:
    ringfence top --json --interval 10 | jq -r '.items[] | select(.rates.drops > 0) | .name'

Keys:
  ? shows all. Tab: guests, vifs, vbds, uplinks, fronts, driver domains. s, r: order.
  /: filter. Enter: all numbers of one guest. q: quit.

Environment:
  NO_COLOR    no colours, if it is set and not empty";

/// Show the rates of guests, their devices and uplinks, live
///
/// Rates, drops by reason, rule violations, requests that wait, memory lent and mapped, egress verdicts and grant operations.
/// Directions are the guest's. Without a terminal it prints tables once, of one interval.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct TopArgs {
    /// Print a JSON object once: each item with its counters, levels and rates
    #[arg(long)]
    pub json: bool,

    /// Time between two samples
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    pub interval: Duration,

    /// Socket of `ringfence serve`, or of --status-socket of `pasta` or `passt`; may be given several times [default:
    /// as the configuration of `serve` says, if it can be reached]
    #[arg(long, value_name = "PATH")]
    pub socket: Vec<PathBuf>,
}

/// Parses a number of seconds from 0.1 to 3600.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("not between 0.1 and 3600 seconds".to_owned())
    }
}

/// Shows the view, or prints once. Returns the exit status.
pub fn main(args: &TopArgs) -> u8 {
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    let is_live = !args.json && !is_dumb && io::stdin().is_terminal() && io::stdout().is_terminal();
    match if is_live { live(args) } else { once(args) } {
        Ok(status) => status,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: top: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

/// Prints the rates of one interval.
fn once(args: &TopArgs) -> anyhow::Result<u8> {
    let collector = Collector::new(&args.socket);
    let before = collector.collect();
    std::thread::sleep(args.interval);
    let view = View::new(Some(&before), collector.collect());
    let text = if args.json {
        format!("{}\n", escape_controls(serde_json::to_string_pretty(&view)?))
    } else {
        view.remarks.iter().for_each(|remark| eprintln!("ringfence: top: {}", printable(remark)));
        tables(&view)
    };
    Out.write_all(text.as_bytes())?;
    Ok(0)
}

/// Formats the tables of all kinds that have items.
fn tables(view: &View) -> String {
    let mut texts = Vec::new();
    for kind in Kind::ALL {
        let rows = view.rows_of(kind, Sort::by(kind, 0), "");
        if !rows.is_empty() {
            texts.push(Table::new(kind, &rows, None, usize::MAX).to_lines());
        }
    }
    if texts.is_empty() { "no guests\n".to_owned() } else { texts.join("\n") }
}

/// Shows the live view. Returns the exit status.
fn live(args: &TopArgs) -> anyhow::Result<u8> {
    // Before there are threads, which inherit the mask.
    let signals = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::WINCH];
    let signals = Signals::new(&signals)?;
    let (sender, samples) = mailbox()?;
    let (end, ended) = channel();
    let (collector, interval) = (Collector::new(&args.socket), args.interval);
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let theme = Theme { has_colours };
    let mut terminal = Terminal::new(Screen::enter(input, output)?)?;
    std::thread::Builder::new()
        .name("collector".to_owned())
        .spawn(move || collect_until(&ended, &collector, interval, &sender))?;
    let mut app = App::new();
    let status = loop {
        terminal.draw(|frame| draw::draw(frame.buffer_mut(), &mut app, theme))?;
        let mut fds = [
            PollFd::new(terminal.backend(), PollFlags::IN),
            PollFd::new(&signals, PollFlags::IN),
            PollFd::from_borrowed_fd(samples.as_fd(), PollFlags::IN),
        ];
        wait_any(&mut fds, None)?;
        let has_keys = !fds[0].revents().is_empty();
        if let Some(arrived) = signals.next()?
            && arrived.number != Signal::WINCH.as_raw()
        {
            break Ending::Killed(arrived.number).exit_status();
        }
        samples.clear();
        while let Some(sample) = samples.take() {
            app.take(sample.ok_or_else(|| anyhow::anyhow!("the collector failed"))?);
        }
        if has_keys && !terminal.backend().keys()?.into_iter().all(|key| app.press(key)) {
            break 0;
        }
    };
    drop(end);
    Ok(status)
}

/// Sends samples until the view ends: `None` after a panic, which has been reported.
fn collect_until(
    ended: &Receiver<()>,
    collector: &Collector,
    interval: Duration,
    samples: &MailSender<Option<Sample>>,
) {
    let mut wait = interval.min(FIRST);
    loop {
        let sample = catch_unwind(AssertUnwindSafe(|| collector.collect())).ok();
        if samples.send(sample).is_err() {
            return;
        }
        if ended.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        wait = interval;
    }
}

/// Items and samples for tests.
#[cfg(test)]
mod testing {
    use std::time::Instant;

    use super::sample::{Item, Kind, Sample};

    /// Returns an item with these counters, which belongs to itself.
    pub(super) fn item(kind: Kind, name: &str, counts: &[(&str, u64)]) -> Item {
        let counters = counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        Item { counters, ..Item::new(kind, name, name) }
    }

    pub(super) fn sample(at: Instant, items: Vec<Item>) -> Sample {
        Sample { at, items, remarks: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::testing::{item, sample};
    use super::*;

    #[test]
    fn interval_is_a_number_of_seconds_within_limits() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "x", "0", "-1", "NaN", "inf", "3601"] {
            assert!(parse_interval(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn tables_have_the_kinds_with_items_and_all_columns() {
        let mut guest = item(Kind::Guest, "web\u{1b}", &[("sent_bytes", 5)]);
        guest.place = "blue".to_owned();
        let vif = item(Kind::Vif, "vif2.0", &[("drop_runt", 3)]);
        let view = View::new(None, sample(Instant::now(), vec![guest, vif]));
        let text = tables(&view);
        assert!(text.starts_with("GUEST "), "{text}");
        assert!(text.contains("\nweb\u{fffd}  "), "{text}");
        assert!(text.contains("  SWITCH\n") && text.contains(" blue\n"), "{text}");
        assert!(text.contains("\n\nVIF ") && text.contains(" runt "), "{text}");
        assert!(!text.contains("VBD"), "{text}");
        assert_eq!(tables(&View::default()), "no guests\n");
    }

    #[test]
    fn json_has_kind_name_counters_and_rates_of_each_item() {
        let view = View::new(
            None,
            sample(Instant::now(), vec![item(Kind::Vbd, "vbd2.0", &[("reads", 4)])]),
        );
        let json = serde_json::to_value(&view).unwrap();
        let item = &json["items"][0];
        assert_eq!((&item["kind"], &item["name"]), (&"vbd".into(), &"vbd2.0".into()));
        assert_eq!((&item["counters"]["reads"], item["rates"].is_null()), (&4.into(), true));
        assert!(json["interval_seconds"].is_null() && json["remarks"].is_array());
    }
}
