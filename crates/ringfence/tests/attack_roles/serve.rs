//! Attacks on the host through `ringfence serve` and `ringfence attach`, and on both by guests and toolstacks.
//!
//! As `serve` and `attach` the program is the real daemon with an attacker's code inside. The program installs a log
//! subscriber, which runs the attacks in the daemon's own thread at the first line that a guest causes. All
//! restrictions of the daemon are in force then. As `unboxed` the program runs the same attacks without a sandbox.
//! Each of them must succeed there, because an attack that never succeeds proves nothing.

use std::fs;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence::cli::Cli;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::vbd::frontend::VbdFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState, frontend_root};
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenbus::toolstack::DeviceEntries;
use ringfence_xenstore::{StoreAccess, StoreClient};

use clap::Parser;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::support::lab::{DRIVER, Lab, wait_until};
use crate::support::needs::{Need, skip_for_the_kernel};
use crate::{require, support};

/// Environment variable with the directory of the decoys.
const DECOYS: &str = "ATTACK_DECOYS";
/// Environment variable with the id of a process of the host, the test.
const VICTIM: &str = "ATTACK_VICTIM";
/// Environment variable with the port of the TCP decoy.
const PORT: &str = "ATTACK_PORT";

/// Tests of this module.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("serve::attack_without_the_box_succeeds", attack_without_the_box_succeeds),
    (
        "serve::serve_taken_over_reaches_nothing_of_the_host",
        serve_taken_over_reaches_nothing_of_the_host,
    ),
    (
        "serve::attach_taken_over_reaches_nothing_of_the_host",
        attach_taken_over_reaches_nothing_of_the_host,
    ),
    (
        "serve::attach_of_a_disk_taken_over_reaches_nothing_of_the_host",
        attach_of_a_disk_taken_over_reaches_nothing_of_the_host,
    ),
    ("serve::serve_has_no_rights_beyond_its_own", serve_has_no_rights_beyond_its_own),
    ("serve::serve_is_not_readable_by_an_equal_process", serve_is_not_readable_by_an_equal_process),
    (
        "serve::guest_that_connects_all_the_time_writes_few_lines",
        guest_that_connects_all_the_time_writes_few_lines,
    ),
    (
        "serve::tap_of_a_device_with_unreadable_keys_is_removed",
        tap_of_a_device_with_unreadable_keys_is_removed,
    ),
    (
        "serve::disk_of_another_format_is_refused_by_serve",
        disk_of_another_format_is_refused_by_serve,
    ),
    ("serve::disk_of_another_format_is_refused_by_run", disk_of_another_format_is_refused_by_run),
    (
        "serve::disk_swapped_for_a_file_elsewhere_is_not_opened",
        disk_swapped_for_a_file_elsewhere_is_not_opened,
    ),
];

// ---------------------------------------------------------------------------------------------
// The attacker

/// Runs the daemon, and the attacks at the first log line with this message.
pub(crate) fn main_taken_over(message: &'static str) -> ExitCode {
    let layer = Attacker { message, done: AtomicBool::new(false) };
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).unwrap();
    ringfence::main_with(Cli::parse()).into()
}

/// Runs the attacks without a sandbox.
pub(crate) fn main_unboxed() -> ExitCode {
    attack();
    ExitCode::SUCCESS
}

/// Log subscriber with the code of the attacker.
struct Attacker {
    message: &'static str,
    done: AtomicBool,
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Attacker {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut said = Said(String::new());
        event.record(&mut said);
        say(&said.0);
        if said.0 == self.message && !self.done.swap(true, Ordering::Relaxed) {
            attack();
            say("[attacks done]");
        }
    }
}

/// Message of a log line.
struct Said(String);

impl tracing::field::Visit for Said {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

fn say(line: &str) {
    // A lost line makes the test fail.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn note<T>(attack: &str, outcome: io::Result<T>) {
    match outcome {
        Ok(_) => say(&format!("[{attack}: SUCCEEDED]")),
        Err(error) => say(&format!("[{attack}: refused: {error}]")),
    }
}

/// Attacks that any host allows to root.
const ATTACKS: [&str; 14] = [
    "unix socket",
    "unix socket by a descriptor",
    "abstract socket",
    "tcp connection",
    "tcp listener",
    "file in /etc",
    "file beside the socket",
    "node in /dev",
    "core pattern",
    "home of root",
    "root of another process",
    "program",
    "mount",
    "namespace",
];

fn attack() {
    let decoys = PathBuf::from(std::env::var(DECOYS).unwrap());
    let port: u16 = std::env::var(PORT).unwrap().parse().unwrap();
    let socket = decoys.join("s");
    note("unix socket", UnixStream::connect(&socket));
    let by_descriptor = |number: u32| {
        let path = format!("/proc/self/fd/{number}/../../../../../..{}", socket.display());
        UnixStream::connect(path)
    };
    note(
        "unix socket by a descriptor",
        (0..64).map(by_descriptor).find(Result::is_ok).unwrap_or_else(|| {
            // A process without a sandbox has this directory open.
            Err(io::ErrorKind::NotFound.into())
        }),
    );
    let name = abstract_name(&decoys);
    note("abstract socket", UnixStream::connect_addr(&name));
    note("tcp connection", TcpStream::connect(("127.0.0.1", port)));
    note("tcp listener", TcpListener::bind("127.0.0.1:0"));
    let file = Path::new("/etc/ringfence-attack");
    note("file in /etc", fs::write(file, "x"));
    let _ = fs::remove_file(file);
    note("file beside the socket", fs::write(decoys.join("x"), "x"));
    let node = Path::new("/dev/ringfence-attack");
    note("node in /dev", fs::write(node, "x"));
    let _ = fs::remove_file(node);
    let pattern = fs::OpenOptions::new().write(true).open("/proc/sys/kernel/core_pattern");
    note("core pattern", pattern);
    note("home of root", fs::read_dir("/root"));
    let victim = std::env::var(VICTIM).unwrap();
    note("root of another process", fs::read_link(format!("/proc/{victim}/root")));
    note("program", Command::new("/bin/true").status());
    note("mount", rustix::mount::mount_bind("/dev", "/dev").map_err(io::Error::from));
    note("namespace", namespaces::unshare(Fresh::MountNetIpcUts));
}

// ---------------------------------------------------------------------------------------------
// What is attacked

/// Sockets of the host that the daemon does not need. They accept all connections.
struct Decoys {
    directory: tempfile::TempDir,
    _unix: UnixListener,
    _named: UnixListener,
    tcp: TcpListener,
}

fn abstract_name(directory: &Path) -> SocketAddr {
    SocketAddr::from_abstract_name(directory.as_os_str().as_encoded_bytes()).unwrap()
}

impl Decoys {
    /// Creates them at the usual places of service managers and container engines.
    fn new() -> Decoys {
        let directory = tempfile::Builder::new().prefix("rf").tempdir_in("/run").unwrap();
        Decoys {
            _unix: UnixListener::bind(directory.path().join("s")).unwrap(),
            _named: UnixListener::bind_addr(&abstract_name(directory.path())).unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            directory,
        }
    }

    /// Words that start this program with the attacker inside.
    fn starter(&self) -> Vec<String> {
        let program = std::env::current_exe().unwrap();
        vec![
            "env".to_owned(),
            format!("{DECOYS}={}", self.directory.path().display()),
            format!("{PORT}={}", self.tcp.local_addr().unwrap().port()),
            format!("{VICTIM}={}", std::process::id()),
            program.to_str().unwrap().to_owned(),
        ]
    }
}

fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

/// Kernel's version, major and minor.
fn kernel() -> (u32, u32) {
    let release = rustix::system::uname().release().to_str().unwrap().to_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Checks that each attack was tried, and that all except those in `other` were refused.
fn all_refused(log: &str, other: &[&str]) {
    for attack in ATTACKS.iter().filter(|attack| !other.contains(attack)) {
        assert!(log.contains(&format!("[{attack}: refused: ")), "{attack} in:\n{log}");
    }
}

/// Returns the attacks that only Landlock stops, if this kernel's Landlock is too old for them.
fn left_to_landlock() -> &'static [&'static str] {
    match kernel() {
        (..=5, _) | (6, ..7) => {
            skip_for_the_kernel("Landlock restricts no sockets before Linux 6.7");
            &["abstract socket", "tcp connection", "tcp listener"]
        }
        (6, 7..12) => {
            skip_for_the_kernel("Landlock restricts no abstract sockets before Linux 6.12");
            &["abstract socket"]
        }
        _ => &[],
    }
}

fn configure(directory: &Path, lines: &str) {
    let images = directory.join("images");
    fs::create_dir_all(&images).unwrap();
    let text = format!(
        "[network]\nattach = 'switch'\n[disks]\npaths = ['/dev', '{}']\n{lines}\n",
        images.display()
    );
    fs::write(directory.join("ringfence.toml"), text).unwrap();
}

/// Creates a vif of domain `number`, as the toolstack does.
fn plug_in(store: &mut StoreClient, number: u16) -> DeviceId {
    let (kind, frontend) = (DeviceKind::Vif, DomId(number));
    let device = DeviceId { kind, frontend, backend: DRIVER, handle: 0 };
    let config = VifConfig { mac: [2, 0, 0, 0, 0, 9], mtu: 1500 };
    toolstack::create(store, &device, config).unwrap();
    let readable = PermissionList::owned_by(DomId(0), NodeAccess::Read);
    store.set_perms(&frontend_root(frontend, DeviceKind::Vif), &readable).unwrap();
    device
}

/// Creates a disk of a new domain, as the toolstack does.
fn disk_of(lab: &mut Lab, params: &str) -> (LocalPlatform, DeviceId) {
    let (_, socket) = lab.hub.admit(None, false).unwrap();
    let platform = LocalPlatform::connect(socket).unwrap();
    let platform = platform.with_arena(ArenaShape::of(2048, 2048));
    let device = create_disk(&mut lab.store, platform.domid(), params);
    (platform, device)
}

/// Creates the disk `xvda` of a domain.
fn create_disk(store: &mut StoreClient, frontend: DomId, params: &str) -> DeviceId {
    let device = DeviceId { kind: DeviceKind::Vbd, frontend, backend: DRIVER, handle: 51712 };
    let front = [("virtual-device", "51712".to_owned()), ("device-type", "disk".to_owned())];
    let back = [("mode", "w"), ("dev", "xvda"), ("params", params)];
    let back = back.map(|(key, value)| (key, value.to_owned()));
    let entries = DeviceEntries { frontend: &front, backend: &back };
    ringfence_xenbus::toolstack::create(store, &device, entries).unwrap();
    device
}

fn disk_status(lab: &mut Lab, device: &DeviceId) -> String {
    let key = format!("{}/disk-status", device.backend_path());
    let mut said = None;
    wait_until("the toolstack is told", || {
        said = lab.store.read_opt(&key).unwrap();
        said.is_some()
    });
    String::from_utf8(said.unwrap()).unwrap()
}

/// Value of a line of /proc/PID/status.
fn status_of(pid: u32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

// ---------------------------------------------------------------------------------------------
// Tests

fn attack_without_the_box_succeeds() {
    require!(Need::Root, Need::Program("unshare", "util-linux"));
    let decoys = Decoys::new();
    // The attacker has a directory open, and mounts of its own.
    let script = "exec 9<\"$1\"; shift; exec \"$@\" unboxed";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(decoys.directory.path())
        .args(decoys.starter())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    for attack in ATTACKS {
        assert!(log.contains(&format!("[{attack}: SUCCEEDED]")), "{attack} in:\n{log}");
    }
}

fn serve_taken_over_reaches_nothing_of_the_host() {
    require!(Need::Root);
    let decoys = Decoys::new();
    let starter = decoys.starter();
    let mut lab = Lab::start_as(&words(&starter), |dir| configure(dir, "nbd = false"));
    plug_in(&mut lab.store, 2);
    wait_until("the attacks end", || lab.log().contains("[attacks done]"));
    all_refused(&lab.log(), left_to_landlock());
    assert_eq!(fs::read_dir(decoys.directory.path()).unwrap().count(), 1, "the socket alone");
    // The daemon still serves.
    let image = lab.dir.path().join("images/a");
    fs::write(&image, [0; 4096]).unwrap();
    let (_guest, disk) = disk_of(&mut lab, image.to_str().unwrap());
    assert_eq!(disk_status(&mut lab, &disk), "open");
}

/// Process that is killed at the end of its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn attach_taken_over_reaches_nothing_of_the_host() {
    require!(Need::Root, Need::Guests);
    let mut lab = Lab::start(|dir| configure(dir, ""));
    plug_in(&mut lab.store, 2);
    attach_taken_over_reaches_nothing(&lab, &["--name", "eth7"]);
}

fn attach_of_a_disk_taken_over_reaches_nothing_of_the_host() {
    require!(Need::Root, Need::Guests);
    let mut lab = Lab::start(|dir| configure(dir, ""));
    let image = lab.dir.path().join("images/a");
    fs::write(&image, [0; 4096]).unwrap();
    create_disk(&mut lab.store, DomId(2), image.to_str().unwrap());
    let readable = PermissionList::owned_by(DomId(0), NodeAccess::Read);
    lab.store.set_perms(&frontend_root(DomId(2), DeviceKind::Vbd), &readable).unwrap();
    let socket = lab.dir.path().join("disk.sock");
    let options = ["--disk", "xvda", "--socket", socket.to_str().unwrap()];
    attach_taken_over_reaches_nothing(&lab, &options);
}

/// Runs the attacks in `ringfence attach` with these options, and checks that none succeeds.
fn attach_taken_over_reaches_nothing(lab: &Lab, options: &[&str]) {
    let decoys = Decoys::new();
    let log = lab.dir.path().join("attach.log");
    let attach = Command::new("unshare")
        .arg("--net")
        .args(decoys.starter())
        .args(["attach", "-v", "--platform"])
        .arg(format!("local:{}", lab.dir.path().join("hub.sock").display()))
        .args(options)
        .stdin(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let attach = Killed(attach);
    let said = || fs::read_to_string(&log).unwrap();
    wait_until("the attacks end", || said().contains("[attacks done]"));
    all_refused(&said(), left_to_landlock());
    for key in ["CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"] {
        assert_eq!(status_of(attach.0.id(), key), "0000000000000000", "{key}");
    }
    assert_eq!(status_of(attach.0.id(), "NoNewPrivs"), "1");
    assert_eq!(status_of(attach.0.id(), "Seccomp"), "2");
}

fn serve_has_no_rights_beyond_its_own() {
    let lab = Lab::start(|dir| configure(dir, ""));
    let root = rustix::process::geteuid().is_root();
    // The daemon has only CAP_NET_ADMIN.
    let own = if root { "0000000000001000" } else { "0000000000000000" };
    for key in ["CapEff", "CapPrm"] {
        assert_eq!(status_of(lab.pid(), key), own, "{key}");
    }
    for key in ["CapInh", "CapAmb"] {
        assert_eq!(status_of(lab.pid(), key), "0000000000000000", "{key}");
    }
    if root {
        assert_eq!(status_of(lab.pid(), "CapBnd"), own);
    }
    assert_eq!(status_of(lab.pid(), "NoNewPrivs"), "1");
    assert_eq!(status_of(lab.pid(), "Seccomp"), "2");
    let limits = fs::read_to_string(format!("/proc/{}/limits", lab.pid()));
    // Only root can read these files of a process that is not dumpable.
    if let Ok(limits) = limits {
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        // The soft limit may be zero by default; the hard one is not.
        let limits: Vec<&str> = core.split_whitespace().skip(4).take(2).collect();
        assert_eq!(limits, ["0", "0"], "{core}");
    }
}

fn serve_is_not_readable_by_an_equal_process() {
    require!(Need::Root, Need::Program("setpriv", "util-linux"));
    let lab = Lab::start(|dir| configure(dir, ""));
    let equal = |script: &str| {
        let rights = ["--bounding-set", "-all,+net_admin", "--inh-caps", "-all"];
        let words = ["sh", "-c", script];
        Command::new("setpriv").args(rights).args(words).output().unwrap()
    };
    // Tracing depends on rights, and a process with equal rights may trace.
    let control = equal("sleep 60 & cat /proc/$!/maps; read=$?; kill $!; exit $read");
    assert!(control.status.success(), "{control:?}");
    let maps = equal(&format!("cat /proc/{}/maps", lab.pid()));
    assert!(!maps.status.success(), "{maps:?}");
}

fn guest_that_connects_all_the_time_writes_few_lines() {
    const CYCLES: usize = 20;
    let mut lab = Lab::start(|dir| configure(dir, ""));
    let image = lab.dir.path().join("images/a");
    fs::write(&image, [0; 4096]).unwrap();
    let (platform, device) = disk_of(&mut lab, image.to_str().unwrap());
    let options = BlkfrontOptions::default();
    let mut front = VbdFrontend::new(&platform, device, options, Arc::new(|| {})).unwrap();
    let mut store = platform.store().unwrap();
    let back_state = format!("{}/state", device.backend_path());
    let front_state = format!("{}/state", device.frontend_path());
    for _ in 0..CYCLES {
        wait_until("the guest connects", || {
            front.look(&platform, &mut store).unwrap();
            front.is_up()
        });
        front.close(&mut store).unwrap();
        let state = XenbusState::Initialising.to_string();
        wait_until("the backend lets go", || lab.status().disks.iter().all(|disk| !disk.connected));
        store.write(&front_state, state).unwrap();
        wait_until("the backend waits", || {
            store.read(&back_state).unwrap() == XenbusState::InitWait.to_string().as_bytes()
        });
    }
    let log = lab.log();
    let lines = log.lines().filter(|line| line.contains("connected")).count();
    assert!((2..CYCLES).contains(&lines), "{lines} lines of {CYCLES} cycles:\n{log}");
}

fn tap_of_a_device_with_unreadable_keys_is_removed() {
    require!(Need::Root, Need::Guests, Need::Program("ip", "iproute2"));
    let program = ["unshare", "--net", env!("CARGO_BIN_EXE_ringfence")];
    let mut lab = Lab::start_as(&program, |dir| {
        fs::write(dir.join("ringfence.toml"), "[network]\nbridge = ''\n").unwrap();
    });
    let device = plug_in(&mut lab.store, 2);
    let pid = lab.pid().to_string();
    let has_tap = || {
        let words = ["--target", &pid, "--net", "ip", "link", "show", "vif2.0"];
        Command::new("nsenter").args(words).output().unwrap().status.success()
    };
    wait_until("the interface is there", has_tap);
    // The daemon can no longer read the address, and a key changes.
    let unreadable = PermissionList::owned_by(DomId(0), NodeAccess::None);
    let mac = format!("{}/mac", device.backend_path());
    lab.store.set_perms(&mac, &unreadable).unwrap();
    lab.write(&device, "rate", "1,1");
    wait_until("the refusal is logged", || lab.log().contains("could not be looked at"));
    toolstack::remove(&mut lab.store, &device).unwrap();
    wait_until("the interface is removed", || !has_tap());
}

/// Returns content that begins like a QCOW2 image.
fn qcow2() -> Vec<u8> {
    let mut content = vec![0; 65536];
    content[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    content
}

fn disk_of_another_format_is_refused_by_serve() {
    let mut lab = Lab::start(|dir| configure(dir, ""));
    let image = lab.dir.path().join("images/a.qcow2");
    fs::write(&image, qcow2()).unwrap();
    let (_one, refused) = disk_of(&mut lab, image.to_str().unwrap());
    let said = disk_status(&mut lab, &refused);
    assert!(said.contains("qcow2") && said.contains("target=raw:"), "{said}");
    let odd = lab.dir.path().join("images/odd");
    fs::write(&odd, [0; 1000]).unwrap();
    let (_two, refused) = disk_of(&mut lab, odd.to_str().unwrap());
    let said = disk_status(&mut lab, &refused);
    assert!(said.contains("truncate -s 1024"), "{said}");
    let (_three, raw) = disk_of(&mut lab, &format!("raw:{}", image.display()));
    assert_eq!(disk_status(&mut lab, &raw), "open");
    assert_eq!(fs::read(&image).unwrap(), qcow2());
}

fn disk_of_another_format_is_refused_by_run() {
    require!(Need::Guests);
    let lab = support::Lab::new();
    let image = lab.file("a.qcow2");
    fs::write(&image, qcow2()).unwrap();
    let odd = lab.file("odd");
    fs::write(&odd, [0; 1000]).unwrap();
    for (disk, why) in [(&image, "format=raw"), (&odd, "truncate -s 1024")] {
        let options = format!("--uplink none --disk {}", disk.display());
        let finished = lab.script(&options, "true").finish(support::MOMENT);
        assert!(finished.status != Some(0) && finished.stderr.contains(why), "{}", finished.stderr);
    }
    let options = format!("--uplink none --disk {},format=raw", image.display());
    let finished = lab.script(&options, "true").finish(support::MOMENT);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    assert_eq!(fs::read(&image).unwrap(), qcow2());
}

fn disk_swapped_for_a_file_elsewhere_is_not_opened() {
    let mut lab = Lab::start(|dir| configure(dir, ""));
    let (image, outside) = (lab.dir.path().join("images/a"), lab.dir.path().join("outside"));
    fs::write(&outside, [0; 4096]).unwrap();
    std::os::unix::fs::symlink(&outside, &image).unwrap();
    let (_guest, device) = disk_of(&mut lab, image.to_str().unwrap());
    let said = disk_status(&mut lab, &device);
    assert!(said.contains("not below a folder"), "{said}");
    let links = fs::read_dir(format!("/proc/{}/fd", lab.pid()));
    // Only root can read the daemon's descriptors.
    for link in links.into_iter().flatten() {
        let target = fs::read_link(link.unwrap().path()).unwrap_or_default();
        assert_ne!(target, outside);
    }
}
