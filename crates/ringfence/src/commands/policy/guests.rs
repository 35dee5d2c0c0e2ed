//! `ringfence policy guests`: the running guests with an egress policy, or that may get one.

use std::fmt::Write as _;

use crate::commands::find::{self, Silent};
use ringfence_hostnet::text::printable;

/// Guest with a policy, or one that may get one.
struct Row {
    pid: i32,
    name: String,
    /// Command of Ringfence that connects it.
    program: String,
    policy: String,
}

/// Returns the table of the guests. Those that do not answer are named on standard error.
///
/// # Errors
///
/// Returns the reason for which the runtime directory cannot be read.
pub(super) fn list() -> anyhow::Result<String> {
    let (guests, sessions) = (find::all()?, find::sessions()?);
    let silent: Vec<&Silent> = guests.silent.iter().chain(&sessions.silent).collect();
    silent.iter().for_each(|silent| eprintln!("ringfence: policy: {silent}"));
    let mut rows: Vec<Row> = Vec::new();
    for found in guests.found {
        // A guest without an uplink cannot have a policy.
        if found.guest.policy.is_none() && found.guest.uplink.is_empty() {
            continue;
        }
        let (name, program) = (found.guest.name, "run".to_owned());
        rows.push(Row { pid: found.pid, name, program, policy: shown(found.guest.policy) });
    }
    rows.extend(sessions.found.into_iter().map(|found| Row {
        pid: found.pid,
        name: found.guest.name,
        program: found.guest.program,
        policy: shown(found.guest.policy),
    }));
    Ok(table(&rows))
}

fn shown(policy: Option<String>) -> String {
    policy.unwrap_or_else(|| "none".to_owned())
}

fn table(rows: &[Row]) -> String {
    let heads = ["NAME", "PID", "PROGRAM", "POLICY"].map(str::to_owned);
    let cells = rows.iter().map(|row| {
        let texts = [&row.name, &row.pid.to_string(), &row.program, &row.policy];
        texts.map(|text| printable(text))
    });
    let lines: Vec<[String; 4]> = std::iter::once(heads).chain(cells).collect();
    let width = |column: usize| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default()
    };
    let widths = [width(0), width(1), width(2)];
    let mut text = String::new();
    for [name, pid, program, policy] in &lines {
        let [w0, w1, w2] = widths;
        let _ = writeln!(text, "{name:w0$}  {pid:w1$}  {program:w2$}  {policy}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_line_for_each_guest_without_control_characters() {
        let row = |pid, name: &str, program: &str| Row {
            pid,
            name: name.to_owned(),
            program: program.to_owned(),
            policy: "1 rule (--allow)".to_owned(),
        };
        let text = table(&[row(17, "agent", "run"), row(4711, "vm\u{1b}.socket", "passt")]);
        let expected = "NAME        PID   PROGRAM  POLICY\n\
                        agent       17    run      1 rule (--allow)\n\
                        vm\u{fffd}.socket  4711  passt    1 rule (--allow)\n";
        assert_eq!(text, expected);
    }
}
