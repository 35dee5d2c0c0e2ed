//! One path through an uplink: a client in a namespace of its own, a TAP, and an uplink thread.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_platform::Counters;
use ringfence_platform::vhost;
use ringfence_sys::clock::Clock;
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::runner::{Runner, RunnerEnd};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};
use ringfence_uplink_process::link::{LinkOrder, Made, QueueLink};

use super::super::args::UplinkPeer;
use super::super::end::{CaseResult, EndMessage};
use super::super::peers::{Behind, GUEST, HOST, run};
use super::{LinkName, LinkSetup};
use crate::usage::vhost_worker_ns;

/// Name of the interface, here and in the client's namespace.
const INTERFACE: &str = "bench1";
const GUEST_MAC: [u8; 6] = [0x02, 0x52, 0x46, 0, 0, 0x64];
/// Spin time of the uplink's idle strategy, as in its process.
const SPIN: Duration = Duration::from_micros(50);

pub(super) struct LinkRun {
    pub(super) came: CaseResult,
    pub(super) cpu_ns: u64,
    /// System calls of the link.
    pub(super) link_calls: u64,
    /// System calls on sockets.
    pub(super) socket_calls: u64,
}

impl LinkRun {
    pub(super) fn bytes(&self) -> f64 {
        self.came.bytes.max(1) as f64
    }

    /// Returns a number of system calls for each MiB.
    pub(super) fn per_mib(&self, calls: u64) -> f64 {
        calls as f64 * f64::from(1 << 20) / self.bytes()
    }
}

/// Counters of a running uplink.
#[derive(Clone, Default)]
struct Counted {
    link: Arc<Counters>,
    sockets: Arc<UplinkCounters>,
}

impl Counted {
    /// Returns the system calls so far: of the link and of sockets.
    fn calls(&self) -> (u64, u64) {
        (self.link.values().syscalls, self.sockets.syscalls.get())
    }
}

/// Uplink thread, stopped on drop.
struct Carrier {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Carrier {
    fn start(
        link: LinkName,
        setup: LinkSetup,
        tap: Tap,
        counted: Counted,
    ) -> anyhow::Result<Carrier> {
        let device = match link {
            LinkName::Tap => None,
            LinkName::Vhost => Some(vhost::open()?),
        };
        let (stop, stopped) = UnixStream::pair().context("a pair of sockets")?;
        let (up, is_up): (Sender<()>, Receiver<()>) = channel();
        let thread = std::thread::Builder::new()
            .name("uplink".to_owned())
            .spawn(move || carry(setup, tap, device, &counted, &stopped, &up))?;
        let mut carrier = Carrier { stop: Some(stop), thread: Some(thread) };
        // The thread has failed if the channel is closed; `end` returns its error.
        if is_up.recv().is_err() {
            carrier.end()?;
            bail!("the uplink ended");
        }
        Ok(carrier)
    }

    fn end(&mut self) -> anyhow::Result<()> {
        drop(self.stop.take());
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| bail!("the uplink's thread is lost"))
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // A caller that needs the error has called `end` before.
        let _ = self.end();
    }
}

fn carry(
    setup: LinkSetup,
    tap: Tap,
    device: Option<OwnedFd>,
    counted: &Counted,
    stopped: &UnixStream,
    up: &Sender<()>,
) -> anyhow::Result<()> {
    let order = if device.is_some() { LinkOrder::Vhost } else { LinkOrder::Tap };
    let offloads = tap.offloads;
    let Made { link, .. } =
        QueueLink::make(&order, tap.fd, device, offloads, setup.mtu, &counted.link)
            .context("a link")?;
    let host = RealHost::new(Arc::clone(&counted.sockets)).context("sockets")?;
    let uplink = Uplink::new(config(setup)?, Box::new(host), Arc::clone(&counted.sockets));
    // If the starter is gone, the closed stop socket ends the runner.
    let _ = up.send(());
    let ended = match link {
        QueueLink::Tap(link) => Runner::new(uplink, link, Clock::default(), SPIN).run(stopped),
        QueueLink::Vhost(link) => Runner::new(uplink, *link, Clock::default(), SPIN).run(stopped),
        QueueLink::Stream(link) => Runner::new(uplink, link, Clock::default(), SPIN).run(stopped),
        QueueLink::Datagram(link) => Runner::new(uplink, link, Clock::default(), SPIN).run(stopped),
        QueueLink::VhostUser(link) => {
            Runner::new(uplink, *link, Clock::default(), SPIN).run(stopped)
        }
    };
    match ended {
        RunnerEnd::Stopped => Ok(()),
        ended => Err(ended.into()),
    }
}

fn config(setup: LinkSetup) -> anyhow::Result<Config> {
    let (host, guest): (IpAddr, IpAddr) = (HOST.parse()?, GUEST.parse()?);
    Ok(Config {
        mtu: setup.mtu,
        access: Access { guest: vec![guest], host_loopback: vec![host], ..Access::default() },
        guest: GuestNetwork {
            mac: Some(GUEST_MAC),
            addresses: vec![(guest, 24)],
            gateways: vec![host],
            ..GuestNetwork::default()
        },
        ..Config::default()
    })
}

/// Measures one run: a client behind the link runs the case in `order`.
pub(super) fn measure(
    link: LinkName,
    setup: LinkSetup,
    order: &str,
    length: Duration,
) -> anyhow::Result<LinkRun> {
    let mut tap = Tap::create(INTERFACE).context("an interface")?;
    if !setup.whole {
        tap.limit_offloads(TapOffloads(0))?;
    }
    let counted = Counted::default();
    let mut carrier = Carrier::start(link, setup, tap, counted.clone())?;
    let behind = client(setup, order)?;
    match behind.hear(Duration::ZERO)? {
        EndMessage::Begins => {}
        other => bail!("the client said {other:?}"),
    }
    let (cpu, calls) = (cpu_ns()?, counted.calls());
    let came = match behind.hear(length) {
        Ok(EndMessage::Done(came)) => *came,
        other => {
            // A failure of the uplink is the more precise error.
            carrier.end()?;
            bail!("the client said {other:?}");
        }
    };
    let (cpu_after, calls_after) = (cpu_ns()?, counted.calls());
    // The interface may vanish with the client's namespace, so a late error of the link is expected.
    let _ = carrier.end();
    drop(behind);
    Ok(LinkRun {
        came,
        cpu_ns: cpu_after.saturating_sub(cpu),
        link_calls: calls_after.0 - calls.0,
        socket_calls: calls_after.1 - calls.1,
    })
}

/// Starts a client in a namespace of its own and moves the interface there. The client waits until the
/// server is reachable.
fn client(setup: LinkSetup, order: &str) -> anyhow::Result<Behind> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(std::env::current_exe().context("this program's file")?);
    command.args(["internal", "bench-uplink-end", "client", super::CONGESTION, order]);
    let behind = Behind::of(command, UplinkPeer::Ringfence)?;
    let pid = behind.child_in_its_own_net()?.to_string();
    run(&["ip", "link", "set", INTERFACE, "netns", &pid])?;
    let [a, b, c, d, e, f] = GUEST_MAC;
    let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    let (mtu, address) = (setup.mtu.to_string(), format!("{GUEST}/24"));
    let inside = ["nsenter", "-t", &pid, "-n", "ip"];
    for what in [
        &["link", "set", INTERFACE, "address", &mac][..],
        &["link", "set", INTERFACE, "mtu", &mtu],
        &["addr", "add", &address, "dev", INTERFACE],
        &["link", "set", INTERFACE, "up"],
    ] {
        run(&[&inside[..], what].concat())?;
    }
    Ok(behind)
}

/// Returns the CPU time of this process, its descendants, and vhost-net's kernel workers.
fn cpu_ns() -> anyhow::Result<u64> {
    Ok(super::super::cpu_ns()? + vhost_worker_ns(|_| true)?)
}
