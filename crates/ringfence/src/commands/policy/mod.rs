//! `ringfence policy`: checks, converts and prints policy files, explains verdicts, replaces the policy of a guest, and shows its denials and
//! verdicts.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, bail};
use ringfence_policy::{HostName, Policy, Protocol, Verdict};

use ringfence_uplink_process::egress::{self, presets};

mod guests;
mod holder;
pub mod import;
mod set;
mod watch;
mod why;

/// Exit status for a destination that the policy denies.
const STATUS_DENIED: u8 = 1;

/// Actions on policy files.
#[derive(Debug, clap::Subcommand)]
pub enum PolicyCommand {
    /// Check a policy file. Errors name the line and point at the character; the exit status is then 125
    Check {
        /// The policy file
        file: PathBuf,
    },
    /// Say what would happen to a connection, and which rule decides
    ///
    /// The exit status is 0 if the policy allows it, 1 if not.
    #[command(after_help = "Example:\n  ringfence policy explain agent.toml api.example.org:443")]
    Explain {
        /// The policy file
        file: PathBuf,
        /// Name or IP address, port, protocol (tcp if absent): `NAME:PORT[/tcp|/udp]`, `[IPV6]:PORT`
        #[arg(value_name = "NAME:PORT")]
        destination: String,
    },
    /// List the running guests and their policies: those of `run`, and those of `pasta`, `passt` and `slirp4netns`
    Guests,
    /// Replace the policy of a running guest, all rules at once
    ///
    /// Connections that the new policy denies end at once, and so do those for which it needs a name that nobody has read. A file
    /// with an error changes nothing. A guest that was started without a policy gets one.
    Set {
        /// Name of the guest, or PID, as `ringfence policy guests` lists them
        guest: String,
        /// The policy file
        file: PathBuf,
    },
    /// List what the policy of a running guest has denied, the latest first, with the rules that would allow it
    ///
    /// The last 256 destinations are kept until the guest ends. A program in the guest can ask for the verdict on a
    /// name itself: `dig TXT why.NAME`.
    #[command(after_help = "Example:\n  ringfence policy why agent --last 5")]
    Why {
        /// Name of the guest, or PID, as `ringfence policy guests` lists them
        guest: String,
        /// Print only the last N
        #[arg(long, value_name = "N")]
        last: Option<usize>,
        /// Print a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Print the verdicts on a running guest as JSON lines until it ends, as `run --egress-log` records them
    #[command(
        after_help = "Example:\n  ringfence policy watch agent | jq -r 'select(.verdict == \"deny\") | .allow'"
    )]
    Watch {
        /// Name of the guest, or PID, as `ringfence policy guests` lists them
        guest: String,
    },
    /// Convert the settings of another sandbox to a policy file, and print it
    ///
    /// Comments name the parts that have no rule, and patterns that cover more than before.
    #[command(after_help = "Example:\n  ringfence policy import ~/.srt-settings.json > agent.toml")]
    Import {
        /// The settings file
        file: PathBuf,
        /// Program whose settings they are [default: that of the file's form]
        #[arg(long, value_enum)]
        from: Option<import::ImportFormat>,
    },
    /// Print the policy file of a preset of `run --policy-preset`, to read it or to write one's own
    #[command(after_help = "Example:\n  ringfence policy preset pypi > mine.toml")]
    Preset {
        /// Name of the preset
        #[arg(value_parser = presets::parser())]
        name: String,
    },
}

/// Runs the command. Returns its output and the exit status.
///
/// # Errors
///
/// Returns the first error of the file, or of the destination.
pub fn run(command: &PolicyCommand) -> anyhow::Result<(String, u8)> {
    match command {
        PolicyCommand::Check { file } => {
            let policy = Policy::new(set::read(file)?)?;
            let rest = if policy.default_action() == ringfence_policy::Action::Deny {
                "everything else is denied"
            } else {
                "everything else is allowed"
            };
            Ok((format!("{}: {} rules, {rest}\n", file.display(), policy.len()), 0))
        }
        PolicyCommand::Explain { file, destination } => {
            let policy = Policy::new(egress::read(file)?)?;
            explain(&policy, destination)
        }
        PolicyCommand::Set { guest, file } => {
            let rules = set::set(guest, file)?;
            Ok((format!("{guest}: {rules} rules of {}\n", file.display()), 0))
        }
        PolicyCommand::Guests => Ok((guests::list()?, 0)),
        PolicyCommand::Why { guest, last, json } => Ok((why::list(guest, *last, *json)?, 0)),
        PolicyCommand::Watch { guest } => {
            watch::print(guest)?;
            Ok((String::new(), 0))
        }
        PolicyCommand::Import { file, from } => Ok((import::import(file, *from)?, 0)),
        PolicyCommand::Preset { name } => Ok((presets::text(name)?.to_owned(), 0)),
    }
}

fn explain(policy: &Policy, destination: &str) -> anyhow::Result<(String, u8)> {
    let (host, protocol) = match destination.rsplit_once('/') {
        None | Some((_, "tcp")) => {
            (destination.strip_suffix("/tcp").unwrap_or(destination), Protocol::Tcp)
        }
        Some((host, "udp")) => (host, Protocol::Udp),
        Some((_, other)) => bail!("`{other}`: a protocol is tcp or udp"),
    };
    let mut text = String::new();
    let mut line = |what: &str, verdict: Verdict| {
        let action = if verdict.is_allowed() { "allowed" } else { "denied" };
        let _ = writeln!(text, "{what}: {action}, {}", policy.describe(verdict.cause));
        verdict.is_allowed()
    };
    let is_allowed = if let Ok(address) = host.parse::<SocketAddr>() {
        let gate = ringfence_policy::Gate::new(Policy::new(policy.to_source())?);
        let decision = gate.connect(address, protocol, std::time::Duration::ZERO);
        line(&format!("{address}/{protocol}"), decision.verdict)
    } else {
        let (name, port) = host.rsplit_once(':').context("a destination is NAME:PORT")?;
        if name.parse::<IpAddr>().is_ok() {
            bail!("an IPv6 address with a port is written [{name}]:{port}");
        }
        let name = HostName::parse(name).with_context(|| format!("`{name}`"))?;
        let port: u16 = port.parse().with_context(|| format!("`{port}`: a port is 1 to 65535"))?;
        let resolves = line(&format!("query for {name}"), policy.resolve(&name));
        line(&format!("{name}:{port}/{protocol}"), policy.name(&name, port, protocol)) && resolves
    };
    Ok((text, if is_allowed { 0 } else { STATUS_DENIED }))
}

#[cfg(test)]
mod tests {
    use ringfence_policy::file;

    use super::*;

    fn explained(destination: &str) -> (String, u8) {
        let text = "allow = ['a.org:443',\n'203.0.113.0/24:22/tcp']\ndeny = ['*.a.org']";
        explain(&Policy::new(file::parse("p.toml", text).unwrap()).unwrap(), destination).unwrap()
    }

    #[test]
    fn file_without_a_rule_does_not_pass_the_check() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let check = PolicyCommand::Check { file: file.path().to_owned() };
        for (text, is_accepted) in [
            ("", false),
            ("allow = []\nstrict-sni = true\n", false),
            ("default = 'allow'\n", true),
            ("default = 'deny'\n", true),
            ("allow = ['a.org']\n", true),
        ] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(run(&check).is_ok(), is_accepted, "{text:?}");
        }
    }

    #[test]
    fn explanation_names_the_line_that_decides() {
        let (text, status) = explained("a.org:443");
        assert_eq!(status, 0);
        assert!(text.contains("a.org:443/tcp: allowed, allow a.org:443 (p.toml:1)"), "{text}");
        let (text, status) = explained("x.a.org:443");
        assert_eq!(status, STATUS_DENIED);
        assert!(text.contains("denied, deny *.a.org (p.toml:3)"), "{text}");
        assert_eq!(explained("a.org:80").1, STATUS_DENIED);
        assert_eq!(explained("203.0.113.9:22").1, 0);
        assert_eq!(explained("203.0.113.9:22/udp").1, STATUS_DENIED);
        assert!(explained("[2001:db8::1]:22").0.contains("no current answer"));
    }
}
