//! Peers of the uplink benchmark: each starts a command in a network behind it.
//!
//! All peers use the default addresses of slirp4netns: the guest is [`GUEST`], and [`HOST`] leads to the
//! host's loopback (with veth: to its other end).

use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::super::gso::cpu::descendants_that_are;
use super::super::messages;
use super::args::{UplinkArgs, UplinkPeer, Workload};
use super::end::{EndMessage, WorkloadKind};
use super::names;

pub(super) const HOST: &str = "10.0.2.2";
pub(super) const GUEST: &str = "10.0.2.100";
/// Port of servers in guests.
pub(super) const PORT: u16 = 5400;
/// Addresses at which pasta and slirp4netns forward queries to the host's name server.
const PASTA_SERVER: &str = "169.254.1.1";
const SLIRP_SERVER: &str = "10.0.2.3";
/// Time limit of any step, in addition to the measured time.
const PATIENCE: Duration = Duration::from_secs(40);

/// Returns the program of a peer that is not part of this one.
fn program_of(args: &UplinkArgs, peer: UplinkPeer) -> Option<&Path> {
    match peer {
        UplinkPeer::Ringfence | UplinkPeer::Policy | UplinkPeer::Host => None,
        UplinkPeer::Pasta => Some(&args.pasta),
        UplinkPeer::SecondPasta => args.second_pasta.as_deref(),
        UplinkPeer::Slirp4netns => Some("slirp4netns".as_ref()),
        UplinkPeer::Veth => Some("ip".as_ref()),
    }
}

/// Returns the name server of a client behind a peer. `None`: that of its `resolv.conf`.
pub(super) fn name_server(peer: UplinkPeer) -> Option<IpAddr> {
    match peer {
        UplinkPeer::Pasta | UplinkPeer::SecondPasta => PASTA_SERVER.parse().ok(),
        UplinkPeer::Slirp4netns => SLIRP_SERVER.parse().ok(),
        _ => None,
    }
}

/// Returns the reason for which a peer cannot be measured; `None` if it can.
pub(super) fn missing(args: &UplinkArgs, peer: UplinkPeer) -> Option<String> {
    let program = program_of(args, peer)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A name with a directory is not searched for: joining it to another one leaves it as it is, if it is absolute.
    let found = std::env::split_paths(&path).any(|directory| directory.join(program).is_file());
    (!found).then(|| format!("{} is not installed", program.display()))
}

/// Returns the first line that a peer's program prints about its version. `None` for a peer of this program or of the
/// kernel.
pub(super) fn version(args: &UplinkArgs, peer: UplinkPeer) -> Option<String> {
    let program = program_of(args, peer).filter(|_| peer != UplinkPeer::Veth)?;
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(format!("{} ({})", text.lines().next().unwrap_or_default(), program.display()))
}

/// Command behind a peer, with its messages; ended on drop.
pub(super) struct Behind {
    peer: UplinkPeer,
    child: Child,
    /// Forwarding process, if the peer runs beside the command.
    helper: Option<Child>,
    said: Receiver<EndMessage>,
}

impl Behind {
    /// Starts this program with `words` behind a peer.
    pub(super) fn start(
        args: &UplinkArgs,
        peer: UplinkPeer,
        case: &Workload,
        words: &[&str],
    ) -> anyhow::Result<Behind> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let mut command = match peer {
            // The server's namespace is the client's.
            UplinkPeer::Host => Command::new("env"),
            UplinkPeer::Ringfence => ours(args, case, &program, &[]),
            UplinkPeer::Policy => {
                let file = names::file();
                ours(args, case, &program, &["--policy".as_ref(), file.as_os_str()])
            }
            UplinkPeer::Pasta => pasta(case, &args.pasta),
            UplinkPeer::SecondPasta => {
                pasta(case, args.second_pasta.as_deref().context("a second pasta")?)
            }
            UplinkPeer::Slirp4netns | UplinkPeer::Veth => {
                let mut command = Command::new("unshare");
                command.args(["--net", "--"]);
                command
            }
        };
        command.arg(&program).args(["internal", "bench-uplink-end"]).args(words);
        let mut behind = Behind::of(command, peer)?;
        match peer {
            UplinkPeer::Slirp4netns => {
                behind.helper = Some(slirp(case, behind.child_in_its_own_net()?)?)
            }
            UplinkPeer::Veth => veth(case, behind.child_in_its_own_net()?)?,
            UplinkPeer::Ringfence
            | UplinkPeer::Policy
            | UplinkPeer::Pasta
            | UplinkPeer::SecondPasta
            | UplinkPeer::Host => {}
        }
        Ok(behind)
    }

    /// Starts a complete command line.
    pub(super) fn of(mut command: Command, peer: UplinkPeer) -> anyhow::Result<Behind> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {}", peer.name()))?;
        let output = child.stdout.take().context("a process without output")?;
        let said = messages::listen(output, EndMessage::Failed)?;
        Ok(Behind { peer, child, helper: None, said })
    }

    /// Waits for the next message, `beyond` the usual time limit.
    pub(super) fn hear(&self, beyond: Duration) -> anyhow::Result<EndMessage> {
        match self.said.recv_timeout(PATIENCE + beyond).context("it is gone, or says nothing")? {
            EndMessage::Failed(why) => bail!(why),
            said => Ok(said),
        }
    }

    /// Returns the processes that forward packets; empty if the kernel does.
    pub(super) fn carriers(&self) -> anyhow::Result<Vec<u32>> {
        Ok(match self.peer {
            UplinkPeer::Ringfence | UplinkPeer::Policy => descendants_that_are("uplink")?,
            UplinkPeer::Pasta | UplinkPeer::SecondPasta => vec![self.child.id()],
            UplinkPeer::Slirp4netns | UplinkPeer::Veth | UplinkPeer::Host => {
                self.helper.iter().map(Child::id).collect()
            }
        })
    }

    /// Waits until the process is in a network namespace of its own. Returns its id.
    pub(super) fn child_in_its_own_net(&self) -> anyhow::Result<u32> {
        let pid = self.child.id();
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let until = Instant::now() + PATIENCE;
        while std::fs::read_link(format!("/proc/{pid}/ns/net"))? == own {
            ensure!(Instant::now() < until, "unshare does nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(pid)
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        // The command ends first; the forwarding process then exits by itself or is ended. SIGTERM lets
        // launchers end their domains.
        for child in [Some(&mut self.child), self.helper.as_mut()].into_iter().flatten() {
            let pid = rustix::process::Pid::from_child(child);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let until = Instant::now() + Duration::from_secs(3);
            while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            // The process may have exited already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn ours(args: &UplinkArgs, case: &Workload, program: &Path, options: &[&OsStr]) -> Command {
    let mut command = Command::new(program);
    command.args(["run", "--quiet", "--uplink", "host", "--switch", "none", "--link", &args.link]);
    command.args(["--mtu", &case.mtu.to_string(), "--uplink-address", &format!("{GUEST}/24")]);
    command.args(["--uplink-gateway", HOST, "--host-loopback", HOST]);
    command.args(["--queues", &args.queues.to_string()]);
    if case.inbound {
        command.args(["-p", &format!("127.0.0.1:{PORT}:{PORT}")]);
    }
    command.args(options).arg("--");
    command
}

fn pasta(case: &Workload, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--config-net", "--quiet", "--runas", "0", "--ipv4-only"]);
    command.args(["--address", GUEST, "--netmask", "24", "--gateway", HOST]);
    command.args(["--mtu", &case.mtu.to_string(), "-u", "none", "-T", "none", "-U", "none"]);
    let port = PORT.to_string();
    command.args(["-t", if case.inbound { &port } else { "none" }]);
    if case.kind == WorkloadKind::BulkDns {
        command.args(["--dns-forward", PASTA_SERVER]);
    }
    command.arg("--");
    command
}

fn slirp(case: &Workload, pid: u32) -> anyhow::Result<Child> {
    let mut command = Command::new("slirp4netns");
    command.args(["--configure", &format!("--mtu={}", case.mtu), &pid.to_string(), "tap0"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("starting slirp4netns")
}

fn veth(case: &Workload, pid: u32) -> anyhow::Result<()> {
    let outside = CableEnd { interface: "bench-out", address: HOST };
    let inside = CableEnd { interface: "bench-in", address: GUEST };
    Cable { outside, inside, mtu: case.mtu }.lay(pid)
}

/// End of a cable.
pub(super) struct CableEnd<'a> {
    pub(super) interface: &'a str,
    /// IPv4 address in a network of 24 bits.
    pub(super) address: &'a str,
}

/// Pair of interfaces between this network namespace and another one.
pub(super) struct Cable<'a> {
    pub(super) outside: CableEnd<'a>,
    pub(super) inside: CableEnd<'a>,
    pub(super) mtu: u16,
}

impl Cable<'_> {
    /// Connects the network namespace of a process, whose loopback is brought up.
    pub(super) fn lay(&self, pid: u32) -> anyhow::Result<()> {
        let (pid, mtu) = (pid.to_string(), self.mtu.to_string());
        let (near, far) = (self.outside.interface, self.inside.interface);
        let [host, guest] =
            [self.outside.address, self.inside.address].map(|ip| format!("{ip}/24"));
        let inside = ["nsenter", "-t", &pid, "--net", "ip"];
        // An earlier row's interface may not be removed yet.
        let _ = Command::new("ip").args(["link", "del", near]).stderr(Stdio::null()).status();
        let link = ["ip", "link", "add", near, "mtu", &mtu, "type", "veth", "peer", "name", far];
        run(&[&link[..], &["mtu", &mtu, "netns", &pid]].concat())?;
        run(&["ip", "addr", "add", &host, "dev", near])?;
        run(&["ip", "link", "set", near, "up"])?;
        run(&[&inside[..], &["link", "set", "lo", "up"]].concat())?;
        run(&[&inside[..], &["addr", "add", &guest, "dev", far]].concat())?;
        run(&[&inside[..], &["link", "set", far, "up"]].concat())
    }
}

/// Runs a command. Fails with its standard error if it fails.
pub(super) fn run(words: &[&str]) -> anyhow::Result<()> {
    let Some((program, rest)) = words.split_first() else { return Ok(()) };
    let output = Command::new(program).args(rest).output().with_context(|| words.join(" "))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", words.join(" "), said.trim());
    Ok(())
}
