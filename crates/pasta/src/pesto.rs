//! `ringfence pesto`: adds, removes and lists ports of a running `pasta`, with the options of pesto, as RootlessKit 3 and
//! Podman 6 start it.
//!
//! The command is a client of the socket of `pasta --conf-path`, of Ringfence's or of passt's
//! ([`crate::forward_rules`]). It reads the rules, changes them, and sends them back. Ringfence's `pasta` answers
//! with the reason if it cannot take them; passt's has no answer. So the command connects once more, and compares.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::forward_rules::{
    INBOUND, RULES_MAX, Rule, RuleTable, TABLES_SIZE_MAX, Update, parse_tables, write_updates,
};
use anyhow::{Context, bail};
use clap::{Args, CommandFactory, FromArgMatches, Parser};

use super::auto_forwards::without_none;
use super::{complain, problem};
use crate::forward_spec::PastaForwardSpec;
use crate::program::STATUS_FAILED;
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::text::printable;

/// Name by which other programs start pesto.
pub const NAME: &str = "pesto";
/// Time limit for the answer to a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the start of a pasta whose socket's file exists.
const START: Duration = Duration::from_secs(1);
/// Maximum length of the reason for which rules are refused, in bytes.
const REASON_MAX: u64 = 4096;

const EXAMPLES: &str = "\
Examples:
  Port 8080 of the host leads to port 80 of a namespace, from now on and no longer:
    ringfence pasta --config-net --conf-path /run/user/1000/pasta.sock PID
    ringfence pesto --add -t 8080:80 /run/user/1000/pasta.sock
    ringfence pesto --delete -t 8080:80 /run/user/1000/pasta.sock

Exit status:
    0 if all of it was done. 1 if not (standard error has the reason); nothing has changed then.";

/// Change the ports of a running `pasta`, with the options of pesto.
///
/// `pasta` must have been started with --conf-path PATH. It may also be that of passt, of 2026 or later. Ports without
/// --add and --delete replace all that there are. Without ports, the command lists them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PestoArgs {
    /// Add ports
    #[arg(short = 'A', long, conflicts_with = "delete")]
    pub add: bool,

    /// Remove ports; connections stay
    #[arg(short = 'D', long)]
    pub delete: bool,

    /// Remove all ports of a table first: HOST, the ports of the host
    #[arg(short = 'C', long, value_name = "TABLE")]
    pub clear: Option<String>,

    /// List the ports, before and after a change
    #[arg(short, long)]
    pub show: bool,

    /// TCP ports of the host: [ADDRESS/]PORT[-LAST][:PORT[-LAST]], excluded ~PORT[-LAST], separated by commas
    #[arg(short = 't', long, value_name = "SPEC")]
    pub tcp_ports: Vec<PastaForwardSpec>,

    /// UDP ports of the host, as with -t
    #[arg(short = 'u', long, value_name = "SPEC")]
    pub udp_ports: Vec<PastaForwardSpec>,

    /// Print the version
    #[arg(long)]
    pub version: bool,

    /// Socket of `pasta --conf-path`
    #[arg(value_name = "PATH", required_unless_present = "version")]
    pub path: Option<PathBuf>,
}

/// Command line of a process that was started by the name `pesto`.
#[derive(Debug, Parser)]
#[command(name = NAME, disable_version_flag = true, max_term_width = 100)]
struct PestoCommandLine {
    #[command(flatten)]
    args: PestoArgs,
}

/// Main function of `pesto`, with the arguments behind the program's name. Returns the exit status.
pub fn main(arguments: &[OsString]) -> u8 {
    let args = match parse(arguments) {
        Ok(args) => args,
        Err(error) => return complain(NAME, &error),
    };
    if args.version {
        println!("pesto (Ringfence) {}", env!("CARGO_PKG_VERSION"));
        return 0;
    }
    run(&args).map_or_else(
        |error| {
            problem(NAME, &causes(&error));
            STATUS_FAILED
        },
        |()| 0,
    )
}

fn parse(arguments: &[OsString]) -> Result<PestoArgs, clap::Error> {
    let words = std::iter::once(OsString::from(NAME)).chain(arguments.iter().cloned());
    let command = PestoCommandLine::command().infer_long_args(true);
    PestoCommandLine::from_arg_matches(&command.try_get_matches_from(words)?)
        .map(|named| named.args)
}

fn run(args: &PestoArgs) -> anyhow::Result<()> {
    let path = args.path.as_deref().context("the socket is missing")?;
    let with_path = || path.display().to_string();
    let (stream, mut tables) = connect(path).with_context(with_path)?;
    let is_change =
        args.clear.is_some() || !args.tcp_ports.is_empty() || !args.udp_ports.is_empty();
    if !is_change {
        if args.add || args.delete {
            bail!("--add and --delete need ports: -t or -u");
        }
        print!("{}", listing(&tables));
        return Ok(());
    }
    if args.show {
        print!("before:\n{}", listing(&tables));
    }
    change(&mut tables, args)?;
    send(stream, &tables).with_context(with_path)?;
    let (_, now) = connect(path).with_context(with_path)?;
    if args.show {
        print!("after:\n{}", listing(&now));
    }
    let is_same = tables.iter().all(|table| now.iter().any(|one| one.rules == table.rules));
    anyhow::ensure!(
        is_same,
        "{}: pasta did not take the ports; its log has the reason",
        with_path()
    );
    Ok(())
}

/// Returns the rules as text, a line each.
fn listing(tables: &[RuleTable]) -> String {
    let line = |table: &RuleTable, rule: &Rule| match table.name.as_str() {
        name if name == INBOUND.1 => format!("{rule}\n"),
        name => format!("{name} {rule}\n"),
    };
    let lines = tables.iter().flat_map(|table| table.rules.iter().map(|rule| line(table, rule)));
    lines.collect()
}

/// Changes the rules as the options say.
fn change(tables: &mut [RuleTable], args: &PestoArgs) -> anyhow::Result<()> {
    if let Some(name) = &args.clear {
        let table = tables.iter_mut().find(|table| table.name == *name);
        table.with_context(|| format!("--clear {name}: there is no such table"))?.rules.clear();
    }
    let inbound = tables.iter_mut().find(|table| table.name == INBOUND.1);
    let inbound = inbound.with_context(|| format!("pasta has no table {}", INBOUND.1))?;
    let wanted = wanted(args, inbound.capabilities)?;
    if !args.add && !args.delete && args.clear.is_none() {
        inbound.rules.clear();
    }
    for rule in wanted {
        if args.delete {
            let at = inbound.rules.iter().position(|one| *one == rule);
            let at = at.with_context(|| format!("--delete {rule}: there is no such port"))?;
            inbound.rules.remove(at);
            continue;
        }
        if let Some(other) = inbound.rules.iter().find(|other| other.conflicts_with(&rule)) {
            bail!("--add {rule}: {other} is there already");
        }
        inbound.rules.push(rule);
    }
    anyhow::ensure!(inbound.rules.len() <= RULES_MAX, "more than {RULES_MAX} entries");
    Ok(())
}

/// Returns the rules that the options name.
fn wanted(args: &PestoArgs, capabilities: u32) -> anyhow::Result<Vec<Rule>> {
    let mut rules = Vec::new();
    for (option, is_udp, specs) in [("-t", false, &args.tcp_ports), ("-u", true, &args.udp_ports)] {
        for listen in without_none(specs) {
            if listen.all || listen.mappings.is_empty() {
                bail!("{option} {listen}: name the ports");
            }
            rules.extend(Rule::of_option(is_udp, listen, capabilities));
        }
    }
    Ok(rules)
}

/// Connects, and reads the rules.
fn connect(path: &Path) -> anyhow::Result<(UnixStream, Vec<RuleTable>)> {
    let mut stream = connect_once_listening(path)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        if let Some(tables) = parse_tables(&bytes)? {
            return Ok((stream, tables));
        }
        let read = stream.read(&mut buffer).context("pasta sent no rules")?;
        if read == 0 || bytes.len() > TABLES_SIZE_MAX {
            bail!("pasta sent no complete rules");
        }
        bytes.extend_from_slice(&buffer[..read]);
    }
}

/// Connects to the socket. The file of a pasta that starts exists for a moment before anyone listens there.
fn connect_once_listening(path: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + START;
    loop {
        match UnixStream::connect(path) {
            Err(error)
                if error.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            connected => return connected,
        }
    }
}

/// Sends the new rules, and waits until pasta has read them.
fn send(mut stream: UnixStream, tables: &[RuleTable]) -> anyhow::Result<()> {
    let update = |table: &RuleTable| Update { number: table.number, rules: table.rules.clone() };
    let updates: Vec<Update> = tables.iter().map(update).collect();
    stream.write_all(&write_updates(&updates))?;
    stream.shutdown(Shutdown::Write)?;
    let mut reason = Vec::new();
    Read::take(&mut stream, REASON_MAX).read_to_end(&mut reason).context("no end of the answer")?;
    match String::from_utf8_lossy(&reason).trim() {
        "" => Ok(()),
        reason => bail!("{}", printable(reason)),
    }
}

#[cfg(test)]
mod tests {
    use crate::forward_rules::capabilities;

    use super::*;

    const BOTH: u32 = capabilities::IPV4 | capabilities::IPV6;

    /// Returns the lines of the rules after a change of a table with `before`.
    fn changed(before: &str, line: &str) -> anyhow::Result<Vec<String>> {
        let args = |line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))
        };
        let rules = wanted(&args(&format!("{before} s"))?, BOTH)?;
        let name = INBOUND.1.to_owned();
        let mut tables = [RuleTable { number: INBOUND.0, name, capabilities: BOTH, rules }];
        change(&mut tables, &args(line)?)?;
        Ok(tables[0].rules.iter().map(Rule::to_string).collect())
    }

    #[test]
    fn socket_that_does_not_listen_yet_is_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("s");
        let kind = rustix::net::SocketType::STREAM;
        let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
        rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        let listening = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            rustix::net::listen(&socket, 1).unwrap();
            socket
        });
        connect_once_listening(&path).unwrap();
        drop(listening.join().unwrap());
        let error = connect_once_listening(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "nobody listens any more");
    }

    #[test]
    fn arguments_of_podman_and_rootlesskit_are_accepted() {
        let ports = changed("", "--add -t 0.0.0.0/8086 -t [::]/8086 /run/pasta.sock").unwrap();
        assert_eq!(ports, ["tcp 0.0.0.0 8086 -> 8086", "tcp :: 8086 -> 8086"]);
        let ports = changed("", "-A --udp-ports=127.0.0.1/8180:80 state/.pasta.sock").unwrap();
        assert_eq!(ports, ["udp 127.0.0.1 8180 -> 80"]);
    }

    #[test]
    fn ports_are_added_removed_and_replaced() {
        let before = "-t 80:81 -u 90-99,~95";
        let all = ["tcp * 80 -> 81", "udp * 90-94 -> 90-94", "udp * 96-99 -> 96-99"];
        assert_eq!(changed(before, "-A -t 82 s").unwrap()[..3], all);
        assert_eq!(changed(before, "-D -u 90-99,~95 s").unwrap(), all[..1]);
        assert_eq!(changed(before, "-t 1 s").unwrap(), ["tcp * 1 -> 1"]);
        assert_eq!(changed(before, "-C HOST s").unwrap(), [""; 0]);
        assert_eq!(changed(before, "-C HOST -A -t 1 s").unwrap(), ["tcp * 1 -> 1"]);
    }

    #[test]
    fn impossible_changes_are_refused() {
        for line in [
            "-A -t auto s",
            "-A -t all s",
            "-A -t 79-80 s",
            "-A -t 0.0.0.0/80 s",
            "-D -t 80 s",
            "-D -t 0.0.0.0/80:81 s",
            "-C SPLICE s",
            "-A -D -t 80 s",
            "-A -t 80",
        ] {
            assert!(changed("-t 80:81", line).is_err(), "{line}");
        }
    }
}
