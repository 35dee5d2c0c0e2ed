//! `ringfence pool-proxy`: a frontend of tests in place of QEMU, and behind the proxy a disk of Ringfence or of
//! qemu-storage-daemon.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::Driver;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::vhost_user::testing::{FrontDisk, PROTOCOL, shape};
use ringfence_vhost_user::testing::{FrontShape, Frontend, memfd};
use ringfence_wire::vhost_user::{number, protocol_feature};
use rustix::process::{Pid, Signal};

use crate::require;
use crate::support::disks::{Background, image_file, is_listening};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running, eventually};

/// Program that looks for a secret in the memory and the descriptors of a process.
const CANARY: &str = include_str!("../../../../vm/linux/canary.py");
/// Place of a text in the first page of a pool, of which the driver uses the mark alone.
const TEXT_AT: usize = 1024;
/// Size of memory that is no pool.
pub(crate) const SECRET_BYTES: u64 = 32 << 20;

/// Starts a proxy to the socket `backend`, and waits until it serves.
fn proxy(lab: &Lab, listen: &str, backend: &str, options: &str) -> Running {
    lab.serve(&["pool-proxy", "--listen", listen, "--backend", backend], options)
}

/// Starts a disk of Ringfence.
fn own_disk(lab: &Lab, socket: &str, file: &str) -> Running {
    lab.serve(&["vhost-user", "blk", "--socket", socket, "--disk", file], "--require-pool auto")
}

/// Starts a disk of qemu-storage-daemon.
pub(crate) fn foreign_disk(lab: &Lab, name: &str) -> Background {
    let file = lab.file(&format!("{name}.img"));
    std::fs::File::create(&file).unwrap().set_len(4 << 20).unwrap();
    let socket = lab.file(name);
    let node = format!("driver=file,node-name=f,filename={}", file.display());
    let export = format!(
        "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable=on,num-queues=2",
        socket.display()
    );
    let words = ["qemu-storage-daemon", "--blockdev", &node, "--export", &export];
    Background::start(&words, || is_listening(&socket))
}

/// Returns the shape of a frontend that uses what qemu-storage-daemon has, and what QEMU asks of a proxy.
pub(crate) fn foreign_shape() -> FrontShape {
    let protocol = PROTOCOL & !protocol_feature::INFLIGHT | protocol_feature::BACKEND_REQ;
    FrontShape { protocol, ..shape(2) }
}

/// Creates a frontend whose pool has a name and a text in its first page.
fn front(shape: FrontShape, name: &str, text: &str) -> Frontend {
    let front = Frontend::new(shape).unwrap();
    front.memory.copy_from(16, format!(" {name}\0").as_bytes()).unwrap();
    front.memory.copy_from(TEXT_AT, text.as_bytes()).unwrap();
    front
}

/// Creates memory that has a secret in each page.
pub(crate) fn secret_memory(secret: &str) -> OwnedFd {
    let file = memfd(SECRET_BYTES).unwrap();
    for at in (0..SECRET_BYTES).step_by(4096) {
        rustix::io::pwrite(&file, secret.as_bytes(), at + 512).unwrap();
    }
    file
}

pub(crate) fn connect(lab: &Lab, socket: &str, mut front: Frontend) -> std::io::Result<FrontDisk> {
    front.connect(&lab.file(socket))?;
    FrontDisk::new(front)
}

/// Returns how often a text is in the memory and the descriptors of a process and of its descendants.
pub(crate) fn hits(lab: &Lab, pid: Pid, text: &str) -> u64 {
    let _ = std::fs::remove_file(lab.file("scanned"));
    for (name, content) in
        [("canary.py", CANARY), ("secret", text), ("scan", ""), ("pid", &pid.to_string())]
    {
        std::fs::write(lab.file(name), content).unwrap();
    }
    lab.spawn(&["python3", "canary.py", ".", "pid"]).succeed(MOMENT);
    let found = lab.read("scanned");
    let number = found.strip_prefix("hits ").and_then(|rest| rest.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{found}"))
}

pub(crate) fn status(lab: &Lab) -> String {
    lab.spawn(&[lab.program(), "status", "--socket", "status"]).succeed(MOMENT)
}

/// Waits until the status has this text.
pub(crate) fn wait_for_status(lab: &Lab, text: &str) {
    assert!(eventually(MOMENT, || status(lab).contains(text)), "{text}: {}", status(lab));
}

pub(crate) const QEMU: Need = Need::Program("qemu-storage-daemon", "qemu-system-common");
pub(crate) const PYTHON: Need = Need::Program("python3", "python3");

#[test]
fn foreign_backend_behind_the_proxy_stores_data_and_sees_no_secret() {
    // Only root reads the memory of a sandbox.
    require!(Need::Root, Need::Guests, QEMU, PYTHON);
    let secret = "a-secret-of-32-bytes-in-a-machine";
    for is_behind in [true, false] {
        let lab = Lab::new();
        let daemon = foreign_disk(&lab, "backend");
        let proxy = proxy(&lab, "s", "backend", "--pool disk --status-socket status -v");
        let mut front = front(foreign_shape(), "disk", "text-that-the-machine-lends");
        front.other_files.push(secret_memory(secret));
        let socket = if is_behind { "s" } else { "backend" };
        let disk = connect(&lab, socket, front).unwrap();
        let (_requests, given) = UnixStream::pair().unwrap();
        disk.front().order(number::SET_BACKEND_REQ_FD, &[], &[given.as_fd()]).unwrap();
        Workload::new(21).exercise(&disk, 200);
        assert!(hits(&lab, daemon.pid(), "text-that-the-machine-lends") > 0, "it sees the pool");
        let found = hits(&lab, daemon.pid(), secret);
        if is_behind {
            assert_eq!(found, 0, "the backend sees the secret");
            wait_for_status(&lab, "vhost-user: lent ");
            wait_for_status(&lab, ", 32 MiB withheld\n");
            let sees = hits(&lab, proxy.pid(), "text-that-the-machine-lends");
            assert_eq!(sees, 0, "the proxy maps the pool, or keeps its descriptor");
        } else {
            assert!(found >= SECRET_BYTES / 4096, "the search does not find the secret: {found}");
        }
        assert_eq!(proxy.end().status, Some(0));
    }
}

#[test]
fn backends_of_two_devices_see_their_own_pool_each() {
    require!(Need::Guests, QEMU, PYTHON);
    let lab = Lab::new();
    let names = ["one", "two"];
    let texts = ["text-in-the-pool-of-device-one", "text-in-the-pool-of-device-two"];
    let daemons = names.map(|name| foreign_disk(&lab, name));
    let proxies =
        names.map(|name| proxy(&lab, &format!("{name}.s"), name, &format!("--pool {name}")));
    let mut fronts = [0, 1].map(|number| front(foreign_shape(), names[number], texts[number]));
    // QEMU hands all memory that has descriptors to each backend.
    for (own, other) in [(0, 1), (1, 0)] {
        let file = fronts[other].file.try_clone().unwrap();
        fronts[own].other_files.push(file);
    }
    let disks: Vec<_> = fronts
        .into_iter()
        .zip(names)
        .map(|(front, name)| connect(&lab, &format!("{name}.s"), front).unwrap())
        .collect();
    for (number, disk) in disks.iter().enumerate() {
        Workload::new(22).exercise(disk, 100);
        let pid = daemons[number].pid();
        assert!(hits(&lab, pid, texts[number]) > 0, "{}: its own pool", names[number]);
        assert_eq!(hits(&lab, pid, texts[1 - number]), 0, "{}: the other pool", names[number]);
    }
    proxies.into_iter().for_each(|proxy| assert_eq!(proxy.end().status, Some(0)));
}

#[test]
fn disk_behind_the_proxy_continues_after_each_process_was_killed() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let mut backend = own_disk(&lab, "backend", &file);
    let mut proxy = proxy(&lab, "s", "backend", "--pool auto");
    let disk = connect(&lab, "s", front(shape(1), "disk", "")).unwrap();
    let mut checker = Checker::new();
    let mut driver = Driver::new(disk.queue(16).unwrap());
    let mut load = Workload::new(23).start(&disk);
    for round in 0..4 {
        load.steps(&mut driver, &mut checker, 100).unwrap();
        if round % 2 == 0 {
            rustix::process::kill_process(backend.pid(), Signal::KILL).unwrap();
            backend.finish(MOMENT);
            backend = own_disk(&lab, "backend", &file);
        } else {
            proxy.inner("proxy").signal(Signal::KILL);
            let finished = proxy.finish(MOMENT);
            assert!(finished.stderr.contains("was killed"), "{}", finished.stderr);
            proxy = self::proxy(&lab, "s", "backend", "--pool auto");
        }
        // The proxy may still be closing the connections of before.
        let reconnected = eventually(MOMENT, || disk.reconnect(&lab.file("s")).is_ok());
        assert!(reconnected, "round {round}");
    }
    load.finish(&mut driver, &mut checker).unwrap();
    proxy.end();
    backend.end();
}

#[test]
fn frontend_that_breaks_a_rule_is_refused_and_counted_and_the_next_is_served() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let backend = own_disk(&lab, "backend", &file);
    let proxy = proxy(&lab, "s", "backend", "--pool disk --status-socket status");
    // No pool of that name.
    assert!(connect(&lab, "s", front(shape(1), "card", "")).is_err());
    proxy.wait_for_error("the pool disk is not among it");
    wait_for_status(&lab, "vhost-user: 1 clients were disconnected");
    // A message that no proxy passes.
    let mut postcopy = front(shape(1), "disk", "");
    postcopy.connect(&lab.file("s")).unwrap();
    postcopy.ask(28, &[]).unwrap_err();
    proxy.wait_for_error("POSTCOPY_ADVISE is refused");
    wait_for_status(&lab, "vhost-user: 2 clients were disconnected");
    // A second hypervisor while one is served.
    let disk = connect(&lab, "s", front(shape(1), "disk", "")).unwrap();
    let mut second = front(shape(1), "disk", "");
    second.connect(&lab.file("s")).unwrap();
    second.ask(number::GET_FEATURES, &[]).unwrap_err();
    Workload::new(31).exercise(&disk, 50);
    wait_for_status(&lab, "vhost-user: lent ");
    proxy.end();
    backend.end();
}

#[test]
fn proxy_without_a_backend_closes_the_connection_and_serves_once_it_is_there() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let proxy = proxy(&lab, "s", "backend", "");
    assert!(connect(&lab, "s", front(shape(1), "disk", "")).is_err());
    proxy.wait_for_error("backend: No such file");
    let backend = own_disk(&lab, "backend", &file);
    Workload::new(32).exercise(&connect(&lab, "s", front(shape(1), "disk", "")).unwrap(), 50);
    let path: PathBuf = lab.file("s");
    assert_eq!(proxy.end().status, Some(0));
    assert!(!path.exists(), "the socket is removed");
    backend.end();
}
