//! Kills the driver domain at random moments and starts another one in its place. The guest notices only
//! the delay: acknowledged writes persist, and the next driver domain completes the other requests.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{Engine, FileDisk, FileOptions};
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, image};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::frontend::{PlatformDisk, VbdFrontend};
use ringfence_block::vbd::toolstack::{self, VbdConfig};
use ringfence_memory::UringPool;
use ringfence_platform::local::hub::{Hub, HubLimits};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::StoreClient;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Variable that makes this program a driver domain, with its directory.
const DIRECTORY: &str = "RINGFENCE_TEST_DRIVER_DOMAIN";
/// Variable that names the engine of the driver domain's disk.
const ENGINE: &str = "RINGFENCE_TEST_ENGINE";
/// Value of [`ENGINE`] for io_uring where the kernel has it. Threads serve the disk otherwise.
const AUTO: &str = "auto";
/// Maximum time for a connection.
const TIMEOUT: Duration = Duration::from_secs(30);

fn device(frontend: DomId) -> DeviceId {
    DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle: 51712 }
}

fn seqpacket() -> std::os::fd::OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Other process of the test: a hub, and a backend for the guest whose number is read from stdin.
#[test]
fn driver_domain() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else { return };
    let socket = seqpacket();
    bind(&socket, &SocketAddrUnix::new(directory.join("hub")).unwrap()).unwrap();
    listen(&socket, 8).unwrap();
    let (mut thread, hub) = Hub::new(HubLimits::default()).unwrap();
    thread.listen(socket).unwrap();
    std::thread::spawn(move || thread.run().unwrap());
    let platform = LocalPlatform::connect(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
    let mut store = platform.store().unwrap();
    let engine = match std::env::var(ENGINE) {
        Ok(name) if name == AUTO => Engine::Auto,
        _ => Engine::Threads,
    };
    let options = FileOptions { engine, ..FileOptions::default() };
    let disk = FileDisk::open(&directory.join("disk"), &options).unwrap();
    // Two queues, and those of a frontend before it.
    let disk = disk.with_rings(Arc::new(UringPool::new(4, 64)));
    println!("\nserving");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let device = device(DomId(line.trim().parse().unwrap()));
    toolstack::create(&mut store, &device, VbdConfig::default()).unwrap();
    let options = BlkbackOptions { queues: 2, ..BlkbackOptions::default() };
    let mut back = VbdBackend::new(device, options, Arc::new(disk), Arc::new(|| {}));
    loop {
        back.look(&platform, &mut store).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Driver domain in a process of its own. Killed when dropped.
struct DriverDomain(Child);

impl DriverDomain {
    fn start(directory: &Path, engine: &str) -> DriverDomain {
        let _ = std::fs::remove_file(directory.join("hub"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "driver_domain", "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, directory)
            .env(ENGINE, engine)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "serving"), "it did not start");
        DriverDomain(child)
    }

    /// Joins the hub as a guest.
    fn join(&mut self, directory: &Path) -> LocalPlatform {
        let socket = seqpacket();
        connect(&socket, &SocketAddrUnix::new(directory.join("hub")).unwrap()).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let platform = platform.with_arena(ArenaShape::of(1024, 64));
        writeln!(self.0.stdin.as_mut().unwrap(), "{}", platform.domid()).unwrap();
        platform
    }
}

impl Drop for DriverDomain {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Connection to one driver domain.
struct Session {
    platform: LocalPlatform,
    store: StoreClient,
    front: VbdFrontend<LocalPlatform>,
}

impl Session {
    fn begin(
        driver: &mut DriverDomain,
        directory: &Path,
        disk: Option<&Arc<PlatformDisk<LocalPlatform>>>,
    ) -> Session {
        let platform = driver.join(directory);
        let options = BlkfrontOptions { queues: 2, pages: 512, ..BlkfrontOptions::default() };
        let device = device(platform.domid());
        let mut front = VbdFrontend::new(&platform, device, options, Arc::new(|| {})).unwrap();
        if let Some(disk) = disk {
            front = front.resuming(Arc::clone(disk));
        }
        let mut store = platform.store().unwrap();
        let begun = Instant::now();
        while !front.is_up() {
            assert!(begun.elapsed() < TIMEOUT, "no connection");
            // The device directory exists once the toolstack has read the guest's number.
            let _ = front.look(&platform, &mut store);
            std::thread::sleep(Duration::from_micros(200));
        }
        Session { platform, store, front }
    }
}

#[test]
fn driver_domain_killed_at_any_moment_loses_no_acknowledged_write() {
    kill_driver_domain("threads", 200);
}

#[test]
fn killed_driver_domain_with_io_uring_leaves_the_disk_to_its_successor() {
    kill_driver_domain(AUTO, 100);
}

/// Kills the driver domain `kills` times under load, and compares the disk with the acknowledged writes.
fn kill_driver_domain(engine: &str, kills: usize) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let file = std::fs::File::create(directory.join("disk")).unwrap();
    file.set_len(4 << 20).unwrap();
    let mut driver = DriverDomain::start(directory, engine);
    let mut session = Session::begin(&mut driver, directory, None);
    let disk = Arc::clone(session.front.disk().unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let rounds = Arc::new(AtomicUsize::new(0));
    let load = {
        let (disk, stop, rounds) = (Arc::clone(&disk), Arc::clone(&stop), Arc::clone(&rounds));
        std::thread::spawn(move || {
            let mut checker = Checker::new();
            let mut driver = Driver::new(disk.queue(16).unwrap());
            let mut running = Workload::new(5).start(&*disk);
            while !stop.load(Ordering::Relaxed) {
                running.steps(&mut driver, &mut checker, 20).unwrap();
                rounds.fetch_add(1, Ordering::Relaxed);
            }
            running.finish(&mut driver, &mut checker).unwrap();
            checker
        })
    };
    let mut random = Random::new(17);
    for kill in 0..kills {
        let begun = Instant::now();
        let until = begun + Duration::from_micros(random.below(12_000));
        let before = rounds.load(Ordering::Relaxed);
        // On a slow machine a random time may end before the disk is in use. One kill in four waits until it is.
        let is_early = || kill % 4 == 0 && rounds.load(Ordering::Relaxed) == before;
        while (Instant::now() < until || is_early()) && !load.is_finished() {
            assert!(begun.elapsed() < TIMEOUT, "no round of the load before kill {kill}");
            let _ = session.front.look(&session.platform, &mut session.store);
            std::thread::sleep(Duration::from_micros(300));
        }
        drop(driver);
        // Requests that the hub passed on are lost with it; the disk keeps those that wait.
        disk.detach();
        driver = DriverDomain::start(directory, engine);
        session = Session::begin(&mut driver, directory, Some(&disk));
    }
    // A slow machine gets little work done between two kills.
    let begun = Instant::now();
    while rounds.load(Ordering::Relaxed) <= 100 && !load.is_finished() {
        assert!(begun.elapsed() < 2 * TIMEOUT, "{rounds:?} rounds: the load was held up");
        let _ = session.front.look(&session.platform, &mut session.store);
        std::thread::sleep(Duration::from_millis(1));
    }
    stop.store(true, Ordering::Relaxed);
    let checker = load.join().unwrap();
    let noticed = disk.rules().get("channel_closed");
    assert!(noticed > kills as u64 / 20, "killed under load {noticed} times");
    checker.check_read(0, &image(&*disk)).unwrap();
    let mut written = vec![0; 4 << 20];
    std::io::Read::read_exact(
        &mut std::fs::File::open(directory.join("disk")).unwrap(),
        &mut written,
    )
    .unwrap();
    checker.check_read(0, &written).unwrap();
}
