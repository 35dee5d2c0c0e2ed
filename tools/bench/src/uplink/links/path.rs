//! One way through an uplink: a client in a namespace of its own, a TAP, the thread of the uplink.

use std::fs;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence::uplink::link::{Link, LinkOrder, Made};
use ringfence_platform::Counters;
use ringfence_sys::clock::Clock;
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_sys::vhost;
use ringfence_uplink::guest::GuestNetwork;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::runner::{RunnerEnd, Runner};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};

use super::super::args::Peer;
use super::super::end::{Came, Said};
use super::super::peers::{Behind, GUEST, HOST, run};
use super::{LinkName, Setup};

/// What the interface is called, here and in the namespace it is moved to.
const INTERFACE: &str = "bench1";
const GUEST_MAC: [u8; 6] = [0x02, 0x52, 0x46, 0, 0, 0x64];
/// As the uplink's process has it.
const SPIN: Duration = Duration::from_micros(50);

/// What one run came to.
pub(super) struct Measured {
    pub(super) came: Came,
    pub(super) cpu_ns: u64,
    /// System calls of the link.
    pub(super) link_calls: u64,
    /// Those of sockets.
    pub(super) socket_calls: u64,
}

/// Counters of an uplink at work.
#[derive(Clone, Default)]
struct Counted {
    link: Arc<Counters>,
    sockets: Arc<UplinkCounters>,
}

impl Counted {
    /// System calls so far: of the link, of sockets.
    fn calls(&self) -> (u64, u64) {
        (self.link.values().syscalls, self.sockets.syscalls.get())
    }
}

/// The thread of an uplink. It ends when this is dropped.
struct Carrier {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Carrier {
    fn start(link: LinkName, setup: Setup, tap: Tap, counted: Counted) -> anyhow::Result<Carrier> {
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
        // Otherwise the thread ended, and says why.
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
        // Whoever wants to know ended it.
        let _ = self.end();
    }
}

fn carry(
    setup: Setup,
    tap: Tap,
    device: Option<OwnedFd>,
    counted: &Counted,
    stopped: &UnixStream,
    up: &Sender<()>,
) -> anyhow::Result<()> {
    let order = if device.is_some() { LinkOrder::Vhost } else { LinkOrder::Tap };
    let offloads = tap.offloads;
    let Made { link, .. } =
        Link::make(&order, tap.fd, device, offloads, setup.mtu, &counted.link).context("a link")?;
    let host = RealHost::new(Arc::clone(&counted.sockets)).context("sockets")?;
    let uplink = Uplink::new(config(setup)?, Box::new(host), Arc::clone(&counted.sockets));
    // Whoever started this has gone: it ends at once.
    let _ = up.send(());
    let ended = match link {
        Link::Tap(link) => Runner::new(uplink, link, Clock::default(), SPIN).run(stopped),
        Link::Vhost(link) => Runner::new(uplink, *link, Clock::default(), SPIN).run(stopped),
    };
    match ended {
        RunnerEnd::Stopped => Ok(()),
        ended => Err(ended.into()),
    }
}

fn config(setup: Setup) -> anyhow::Result<Config> {
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

/// One run: a client behind that link carries out `order`.
pub(super) fn measure(
    link: LinkName,
    setup: Setup,
    order: &str,
    length: Duration,
) -> anyhow::Result<Measured> {
    let mut tap = Tap::create(INTERFACE).context("an interface")?;
    if !setup.whole {
        tap.limit_offloads(TapOffloads(0))?;
    }
    let counted = Counted::default();
    let mut carrier = Carrier::start(link, setup, tap, counted.clone())?;
    let behind = client(setup, order)?;
    match behind.hear(Duration::ZERO)? {
        Said::Begins => {}
        other => bail!("the client said {other:?}"),
    }
    let (cpu, calls) = (cpu_ns()?, counted.calls());
    let came = match behind.hear(length) {
        Ok(Said::Came(came)) => *came,
        other => {
            // If the uplink has failed that is why.
            carrier.end()?;
            bail!("the client said {other:?}");
        }
    };
    let (cpu_after, calls_after) = (cpu_ns()?, counted.calls());
    // The interface may have gone with the client's namespace: whatever the link says of that is no news.
    let _ = carrier.end();
    drop(behind);
    Ok(Measured {
        came,
        cpu_ns: cpu_after.saturating_sub(cpu),
        link_calls: calls_after.0 - calls.0,
        socket_calls: calls_after.1 - calls.1,
    })
}

/// A client in a namespace of its own, into which the interface is moved. It waits until it is reached.
fn client(setup: Setup, order: &str) -> anyhow::Result<Behind> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(std::env::current_exe().context("this program's file")?);
    command.args(["internal", "bench-uplink-end", "client", super::CONGESTION, order]);
    let behind = Behind::of(command, Peer::Ringfence)?;
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

/// Of this process, all below it, and the kernel's workers of vhost-net.
fn cpu_ns() -> anyhow::Result<u64> {
    Ok(super::super::cpu_ns()? + workers_ns()?)
}

/// Those that are threads of the kernel; since Linux 6.4 they are threads of whoever started them.
fn workers_ns() -> anyhow::Result<u64> {
    let mut sum = 0;
    for process in fs::read_dir("/proc").context("/proc")? {
        let process = process?.path();
        let Ok(name) = fs::read_to_string(process.join("comm")) else { continue };
        if name.starts_with("vhost-") {
            let times = fs::read_to_string(process.join("schedstat")).unwrap_or_default();
            let ran = times.split_whitespace().next().and_then(|field| field.parse::<u64>().ok());
            sum += ran.unwrap_or(0);
        }
    }
    Ok(sum)
}
