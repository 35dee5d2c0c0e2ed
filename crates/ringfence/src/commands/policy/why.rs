//! `ringfence policy why`: the denials of a running guest.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use ringfence_base::json::escape_controls;
use ringfence_policy::denials::Denial;
use ringfence_policy::refusal::{clean, destination};

use super::holder::{NoReply, PolicyHolder};
use crate::commands::ps::age;
use ringfence_uplink_process::egress::live::{PolicyReply, PolicyRequest};

/// Time limit for an answer of the launcher.
const ANSWER: Duration = Duration::from_secs(5);

/// Returns the denials of a guest as text, or as a JSON array.
///
/// # Errors
///
/// Returns the reason for which the guest does not answer.
pub(super) fn list(guest: &str, last: Option<usize>, json: bool) -> anyhow::Result<String> {
    let holder = PolicyHolder::find(guest)?;
    let mut denials: Vec<Denial> = Vec::new();
    let wanted = last.unwrap_or(usize::MAX);
    while denials.len() < wanted {
        holder.send(PolicyRequest::Denials { after: denials.len() }, &[])?;
        match holder.receive(Some(ANSWER)) {
            Ok(PolicyReply::Denials(more)) if more.is_empty() => break,
            Ok(PolicyReply::Denials(more)) => denials.extend(more),
            Err(NoReply::Refused(why)) => bail!("{guest}: {why}"),
            Err(error) => return Err(error.into()),
            Ok(_) => bail!("{guest} is of another version of Ringfence"),
        }
    }
    denials.truncate(wanted);
    if json {
        return Ok(format!("{}\n", escape_controls(serde_json::to_string_pretty(&denials)?)));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(text(&denials, now.as_secs_f64()))
}

/// Describes denials, one after the other.
fn text(denials: &[Denial], now: f64) -> String {
    let mut text = String::new();
    let ago =
        |time: f64| age(Duration::try_from_secs_f64(now - time).unwrap_or_default().as_secs());
    for denial in denials {
        let Denial { record, count, first, last } = denial;
        let times = match count {
            1 => format!("once, {} ago", ago(*last)),
            _ => format!("{count} times, first {} ago, last {} ago", ago(*first), ago(*last)),
        };
        let _ = writeln!(text, "{}: {times}", clean(&destination(record)));
        let _ = writeln!(text, "    {}", clean(&record.reason));
        if let Some(rule) = &record.allow {
            let _ = writeln!(text, "    to allow it: --allow {}", clean(rule));
        }
    }
    if text.is_empty() { "nothing was denied\n".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use ringfence_policy::record::{Event, Record};
    use ringfence_policy::{Action, Protocol};

    use super::*;

    #[test]
    fn denial_is_listed_with_its_times_and_the_rule_to_add() {
        let record = Record {
            event: Event::Connect,
            verdict: Action::Deny,
            name: Some("pypi.org\u{1b}[2J".to_owned()),
            address: Some([192, 0, 2, 1].into()),
            port: Some(80),
            protocol: Some(Protocol::Tcp),
            reason: "no rule".to_owned(),
            allow: Some("pypi.org:80".to_owned()),
            sni: None,
            bytes_out: None,
            bytes_in: None,
        };
        let denial = Denial { record, count: 3, first: 1000.0, last: 1060.5 };
        assert_eq!(
            text(std::slice::from_ref(&denial), 1120.0),
            "pypi.org\u{fffd}[2J:80 (192.0.2.1): 3 times, first 2 min ago, last 59 s ago\n\
             \x20   no rule\n    to allow it: --allow pypi.org:80\n"
        );
        let once = Denial { count: 1, ..denial };
        assert!(text(&[once], 0.0).contains(": once, 0 s ago\n"), "a clock that was set back");
        assert_eq!(text(&[], 1.0), "nothing was denied\n");
    }
}
