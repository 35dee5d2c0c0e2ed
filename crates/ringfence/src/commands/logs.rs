//! `ringfence logs`: messages about a guest.
//!
//! The launcher keeps them (`launch/messages.rs`). The client asks for one part after the other, so neither end
//! stores more than one part for a slow reader.

use std::io::Write;

use clap::Args;
use ringfence_sandbox::{ChannelError, STATUS_FAILED};

use super::find::{self, Found};
use super::{Message, Reply, Request};
use ringfence_base::json::escape_controls;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};

const NOTES: &str = "\
Examples:
  The reason why a name or a disk does not work:
    ringfence logs web

  The last ten messages, and all that follow:
    ringfence logs -n 10 -f web

Sources:
  launcher        `ringfence run` itself, with the steps that it prints with -v
  driver domain   the switch and the disks; only for the guest that started its switch
  frontend        network interface and disks of the guest
  uplink          connections to the host's network";

/// Show what Ringfence's processes reported about a guest
///
/// The launcher of the guest keeps the last messages of each of them in memory (500 or 64 KiB) until it ends, also
/// those that it does not print without -v. With `run -v` the processes report more. The output of the guest's command
/// is not among them: it goes to the terminal or the file that `ringfence run` was started with, and is not kept.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct LogsArgs {
    /// Name of the guest, or PID of its `ringfence run`
    #[arg(value_name = "GUEST")]
    pub guest: String,

    /// Wait for further messages until the guest ends
    #[arg(short, long)]
    pub follow: bool,

    /// Print only the last N of the messages that are there
    #[arg(short = 'n', long, value_name = "N")]
    pub tail: Option<usize>,

    /// Print a JSON object a line: number, time in milliseconds since 1970, source, text
    #[arg(long)]
    pub json: bool,
}

/// Prints the messages. Returns the exit status.
pub fn main(args: &LogsArgs) -> u8 {
    match run(args) {
        Ok(()) => 0,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: logs: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

fn run(args: &LogsArgs) -> anyhow::Result<()> {
    let found = find::one(&args.guest)?;
    let mut after = 0;
    let mut present = Vec::new();
    while let Some(part) = next(&found, &mut after, false)?.filter(|part| !part.is_empty()) {
        present.extend(part);
    }
    let skipped = args.tail.map_or(0, |tail| present.len().saturating_sub(tail));
    print(&present[skipped..], args.json)?;
    while args.follow
        && let Some(part) = next(&found, &mut after, true)?
    {
        print(&part, args.json)?;
    }
    Ok(())
}

/// Asks for the messages that follow the last one. Returns `None` after the guest has ended.
fn next(found: &Found, after: &mut u64, wait: bool) -> anyhow::Result<Option<Vec<Message>>> {
    let channel = &found.channel;
    match channel.send(&Request::Messages { after: *after, wait }, &[]) {
        // The last messages may have arrived before the end.
        Ok(()) | Err(ChannelError::Closed) => {}
        Err(error) => return Err(error.into()),
    }
    let reply = match channel.receive() {
        // The kernel reports a reset, once, before the messages that arrived earlier.
        Err(ChannelError::Closed) => channel.receive(),
        other => other,
    };
    let mut part = match reply {
        Ok((Reply::Messages(part), _)) => part,
        Ok(_) => anyhow::bail!("the launcher is of another version of Ringfence"),
        Err(ChannelError::Closed) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    part.retain(|message| message.number > *after);
    *after = part.last().map_or(*after, |last| last.number);
    Ok(Some(part))
}

fn print(messages: &[Message], json: bool) -> anyhow::Result<()> {
    let mut text = String::new();
    for message in messages {
        if json {
            text.push_str(&escape_controls(serde_json::to_string(message)?));
        } else {
            text.push_str(&format_time(message.time));
            text.push_str(&format!(" {}: {}", message.source.label(), message.text));
        }
        text.push('\n');
    }
    let mut out = Out;
    Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
}

/// Formats a time in milliseconds since 1970 as in RFC 3339, in UTC.
fn format_time(milliseconds: u64) -> String {
    let (seconds, fraction) = (milliseconds / 1000, milliseconds % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0, so that a leap day is the last of its year. An era has 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // From March, months of 31, 30, 31, 30, 31 days repeat.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (400 * era + year, month + 3),
        _ => (400 * era + year + 1, month - 9),
    };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_has_the_form_of_rfc_3339() {
        // Compared with `date -u -d @SECONDS`.
        for (milliseconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_709_251_199_000, "2024-02-29T23:59:59.000Z"),
            (1_735_689_599_001, "2024-12-31T23:59:59.001Z"),
            (1_735_689_600_000, "2025-01-01T00:00:00.000Z"),
            (4_107_542_399_000, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(format_time(milliseconds), text);
        }
    }
}
