//! `ringfence pesto`: adds, removes and lists ports of a running `pasta`, with the options of pesto, as RootlessKit 3 and
//! Podman 6 start it.
//!
//! The command is a client of the socket of `pasta --conf-path` (`api`). Both ends are Ringfence's: the format between the
//! real pesto and the real pasta is another one. Each port is one request. If one of several cannot be added, those
//! before it are removed again.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args, CommandFactory, FromArgMatches, Parser};
use serde_json::{Value, json};

use super::auto_ports::without_none;
use super::ports::{Listen, PortSpec};
use super::{STATUS_FAILED, complain, problem};
use crate::causes::causes;

/// Name by which other programs start pesto.
pub const NAME: &str = "pesto";
/// Time limit for the answer to a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of an answer in bytes: the list of the most ports that pasta forwards.
const ANSWER_MAX: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  Port 8080 of the host leads to port 80 of a namespace, from now on and no longer:
    ringfence pasta --config-net --conf-path /run/user/1000/pasta.sock PID
    ringfence pesto --add -t 8080:80 /run/user/1000/pasta.sock
    ringfence pesto --delete -t 8080:80 /run/user/1000/pasta.sock

Exit status:
    0 if all of it was done. 1 if not (standard error has the reason), and then nothing has changed by --add.";

/// Change the ports of a running `pasta`, with the options of pesto.
///
/// `pasta` must have been started with --conf-path PATH, and be Ringfence's.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group = ArgGroup::new("action"))]
pub struct PestoArgs {
    /// Add ports
    #[arg(short = 'A', long, group = "action")]
    pub add: bool,

    /// Remove ports that were added; connections stay
    #[arg(short = 'D', long, group = "action")]
    pub delete: bool,

    /// List the ports that were added
    #[arg(short, long, group = "action")]
    pub show: bool,

    /// TCP ports of the host: [ADDRESS/]PORT[-LAST][:PORT[-LAST]], excluded ~PORT[-LAST], separated by commas
    #[arg(short = 't', long, value_name = "SPEC")]
    pub tcp_ports: Vec<PortSpec>,

    /// UDP ports of the host, as with -t
    #[arg(short = 'u', long, value_name = "SPEC")]
    pub udp_ports: Vec<PortSpec>,

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
struct Named {
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
    let command = Named::command().infer_long_args(true);
    Named::from_arg_matches(&command.try_get_matches_from(words)?).map(|named| named.args)
}

fn run(args: &PestoArgs) -> anyhow::Result<()> {
    let path = args.path.as_deref().context("the socket is missing")?;
    let wanted = wanted(args)?;
    let ask = |request: &Value| ask(path, request).with_context(|| path.display().to_string());
    match (args.add, args.delete, args.show) {
        (true, ..) => add(&wanted, ask),
        (_, true, _) => delete(&wanted, ask),
        (_, _, true) => show(ask),
        _ => bail!("--add, --delete or --show is missing: ports cannot be replaced as a whole"),
    }
}

/// Port of the host and the port of the namespace to which it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Port {
    is_udp: bool,
    /// Address to listen at; `None` for all of both families.
    address: Option<IpAddr>,
    host: u16,
    guest: u16,
}

impl Port {
    fn to_json(self) -> Value {
        // An unspecified address stands for both families, unless the protocol has one.
        let family = self.address.map_or("", |ip| if ip.is_ipv4() { "4" } else { "6" });
        let protocol = if self.is_udp { "udp" } else { "tcp" };
        let address = self.address.map_or(String::new(), |ip| ip.to_string());
        json!({
            "proto": format!("{protocol}{family}"), "host_addr": address,
            "host_port": self.host, "guest_port": self.guest,
        })
    }

    /// Returns `true` if an entry of the list is this port.
    fn is_listed_as(self, entry: &Value) -> bool {
        let address = |key: &str| entry[key].as_str().and_then(|text| text.parse::<IpAddr>().ok());
        let (v4, v6) = (address("host_addr"), address("host_addr6"));
        let is_same_address = match self.address {
            Some(ip) => [v4, v6].into_iter().flatten().eq([ip]),
            None => [v4, v6].into_iter().flatten().all(|ip| ip.is_unspecified()),
        };
        let port = |key: &str, port: u16| entry[key].as_u64() == Some(port.into());
        entry["proto"] == if self.is_udp { "udp" } else { "tcp" }
            && is_same_address
            && port("host_port", self.host)
            && port("guest_port", self.guest)
    }
}

impl std::fmt::Display for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(address) = self.address {
            write!(f, "{address}/")?;
        }
        let protocol = if self.is_udp { "udp" } else { "tcp" };
        write!(f, "{}:{}/{protocol}", self.host, self.guest)
    }
}

/// Returns the ports that the options name.
fn wanted(args: &PestoArgs) -> anyhow::Result<Vec<Port>> {
    let mut ports = Vec::new();
    for (option, is_udp, specs) in [("-t", false, &args.tcp_ports), ("-u", true, &args.udp_ports)] {
        for listen in without_none(specs) {
            check(option, listen)?;
            ports.extend(listen.ports().map(|(host, guest, _)| Port {
                is_udp,
                address: listen.address,
                host,
                guest,
            }));
        }
    }
    if ports.is_empty() != args.show {
        bail!("--add and --delete need ports, and --show has none");
    }
    Ok(ports)
}

fn check(option: &str, listen: &Listen) -> anyhow::Result<()> {
    if listen.auto || listen.all {
        bail!("{option} {listen}: a running pasta forwards named ports only");
    }
    if listen.interface.is_some() {
        bail!("{option} {listen}: a running pasta listens at addresses only, not at an interface");
    }
    if listen.mappings.iter().any(|mapping| mapping.address.is_some()) {
        bail!("{option} {listen}: ports lead to the namespace's own address only");
    }
    Ok(())
}

fn add(wanted: &[Port], ask: impl Fn(&Value) -> anyhow::Result<Value>) -> anyhow::Result<()> {
    let mut added = Vec::new();
    for port in wanted {
        let request = json!({ "execute": "add_hostfwd", "arguments": port.to_json() });
        match ask(&request) {
            Ok(answer) => added.push(answer["id"].clone()),
            Err(error) => {
                for id in added {
                    // The first error is the one to report.
                    let _ = ask(&removal(&id));
                }
                return Err(error.context(format!("--add {port}")));
            }
        }
    }
    Ok(())
}

fn delete(wanted: &[Port], ask: impl Fn(&Value) -> anyhow::Result<Value>) -> anyhow::Result<()> {
    let listed = ask(&json!({ "execute": "list_hostfwd" }))?;
    let entries = listed["entries"].as_array().cloned().unwrap_or_default();
    for port in wanted {
        let entry = entries.iter().find(|entry| port.is_listed_as(entry));
        let entry = entry.with_context(|| format!("--delete {port}: no such port was added"))?;
        ask(&removal(&entry["id"])).with_context(|| format!("--delete {port}"))?;
    }
    Ok(())
}

fn removal(id: &Value) -> Value {
    json!({ "execute": "remove_hostfwd", "arguments": { "id": id } })
}

fn show(ask: impl Fn(&Value) -> anyhow::Result<Value>) -> anyhow::Result<()> {
    let listed = ask(&json!({ "execute": "list_hostfwd" }))?;
    for entry in listed["entries"].as_array().into_iter().flatten() {
        let address = ["host_addr", "host_addr6"].map(|key| entry[key].as_str());
        let addresses: Vec<&str> = address.into_iter().flatten().collect();
        let (proto, host) = (entry["proto"].as_str().unwrap_or_default(), &entry["host_port"]);
        println!("{proto} {} {host} -> {}", addresses.join(","), entry["guest_port"]);
    }
    Ok(())
}

/// Sends one request. Returns the content of the answer.
fn ask(path: &Path, request: &Value) -> anyhow::Result<Value> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(request.to_string().as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    Read::take(&mut stream, ANSWER_MAX).read_to_end(&mut answer).context("no answer")?;
    let answer: Value = serde_json::from_slice(&answer)
        .context("the answer is none of Ringfence's pasta; its pesto works with no other")?;
    if let Some(why) = answer["error"]["desc"].as_str() {
        bail!("{}", crate::launch::report::printable(why));
    }
    Ok(answer["return"].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> anyhow::Result<Vec<Port>> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        wanted(&parse(&words).map_err(|error| anyhow::anyhow!(error.to_string()))?)
    }

    #[test]
    fn arguments_of_podman_and_rootlesskit_are_accepted() {
        let ports = read("--add -t 0.0.0.0/8086 -t [::]/8086 /run/pasta.sock").unwrap();
        let texts: Vec<String> = ports.iter().map(Port::to_string).collect();
        assert_eq!(texts, ["0.0.0.0/8086:8086/tcp", "::/8086:8086/tcp"]);
        assert_eq!(ports[1].to_json()["proto"], "tcp6");
        let ports = read("-A --udp-ports=127.0.0.1/8180:80 state/.pasta.sock").unwrap();
        assert_eq!(
            ports[0].to_json(),
            json!({ "proto": "udp4", "host_addr": "127.0.0.1", "host_port": 8180, "guest_port": 80 })
        );
    }

    #[test]
    fn ports_that_a_running_pasta_cannot_have_are_refused() {
        for line in [
            "-A -t auto s",
            "-A -t all s",
            "-A -t %eth0/80 s",
            "-A -t 80:192.0.2.1/80 s",
            "-A s",
            "-A -D -t 80 s",
            "--show -t 80 s",
            "-A -t 80",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
        assert!(run(&parse(&["-t".into(), "80".into(), "s".into()]).unwrap()).is_err());
    }

    #[test]
    fn port_is_removed_only_if_all_of_it_is_the_same() {
        let entry = json!({
            "id": 1, "proto": "tcp", "host_addr": "0.0.0.0", "host_addr6": "::",
            "host_port": 8080, "guest_port": 80,
        });
        let is_listed = |line: &str| read(line).unwrap()[0].is_listed_as(&entry);
        assert!(is_listed("-D -t 8080:80 s"));
        for line in ["-t 8080", "-u 8080:80", "-t 8081:80", "-t 0.0.0.0/8080:80", "-t ::1/8080:80"]
        {
            assert!(!is_listed(&format!("-D {line} s")), "{line}");
        }
    }

    #[test]
    fn ports_before_one_that_fails_are_removed_again() {
        let asked = std::cell::RefCell::new(Vec::new());
        let ask = |request: &Value| {
            asked.borrow_mut().push(request.clone());
            match request["arguments"]["host_port"].as_u64() {
                Some(82) => bail!("taken"),
                _ => Ok(json!({ "id": asked.borrow().len() })),
            }
        };
        let error = add(&read("-A -t 80-83 s").unwrap(), ask).unwrap_err();
        let error = causes(&error);
        assert!(error.contains("82:82/tcp: taken"), "{error}");
        let removed: Vec<_> =
            asked.borrow()[3..].iter().map(|r| r["arguments"]["id"].clone()).collect();
        assert_eq!(removed, [json!(1), json!(2)]);
    }
}
