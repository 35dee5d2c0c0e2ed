//! Disks of virtual machines: `ringfence vhost-user blk`, with a frontend of tests in place of QEMU.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random};
use ringfence_block::vhost_user::testing::{FrontDisk, PROTOCOL, SLOT_DATA, config, shape};
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::vhost_user::{number, protocol_feature};
use rustix::process::Signal;

use crate::require;
use crate::support::disks::{Background, image_file, is_listening, listens, rounds};
use crate::support::needs::Need;
use crate::support::{Finished, Lab, MOMENT, Running};

/// Starts the command with these options on `disk`, and waits until it serves.
fn blk(lab: &Lab, disk: &str, options: &str) -> Running {
    lab.serve(&["vhost-user", "blk", "--socket", "s", "--disk", disk], options)
}

/// Connects a machine to the command.
fn connect(lab: &Lab, shape: FrontShape) -> FrontDisk {
    let mut front = Frontend::new(shape).unwrap();
    front.connect(&lab.file("s")).unwrap();
    FrontDisk::new(front).unwrap()
}

/// Reads a disk of 4 MiB.
fn content(disk: &FrontDisk) -> Vec<u8> {
    let mut driver = Driver::new(disk.queue(1).unwrap());
    let places = (0..4 << 20).step_by(SLOT_DATA);
    places.flat_map(|at| driver.read(at, SLOT_DATA).unwrap()).collect()
}

fn status(lab: &Lab) -> String {
    lab.spawn(&[lab.program(), "status", "--socket", "status"]).succeed(MOMENT)
}

/// Waits until the status has this text.
fn wait_for_status(lab: &Lab, text: &str) {
    let found = crate::support::eventually(MOMENT, || status(lab).contains(text));
    assert!(found, "{text}: {}", status(lab));
}

#[test]
fn machine_stores_data_through_a_lent_pool() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let running = blk(&lab, &file, "--require-pool auto --status-socket status");
    let disk = connect(&lab, shape(2));
    Workload::new(11).exercise(&disk, 300);
    let bytes = disk.front().memory.len();
    wait_for_status(&lab, &format!("vhost-user: lent {} KiB\n", bytes >> 10));
    assert_eq!(running.end().status, Some(0));
    assert!(!lab.file("s").exists(), "the socket is removed");
}

#[test]
fn machine_that_hands_over_more_than_the_pool_is_refused_and_counted() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let running = blk(&lab, &file, "--require-pool auto --status-socket status");
    let mut front = Frontend::new(FrontShape { has_mark: false, ..shape(1) }).unwrap();
    front.connect(&lab.file("s")).unwrap();
    assert!(FrontDisk::new(front).is_err());
    running.wait_for_error("ivshmem-plain");
    wait_for_status(&lab, "vhost-user: 1 clients were disconnected");
    // The next one is served.
    Workload::new(12).exercise(&connect(&lab, shape(1)), 50);
    running.end();
}

#[test]
fn machine_that_truncates_its_memory_costs_its_own_connection() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let running = blk(&lab, &file, "--status-socket status");
    let disk = connect(&lab, shape(1));
    rustix::fs::ftruncate(&disk.front().file, 0).unwrap();
    rustix::io::write(&disk.front().vrings[0].kick, &1_u64.to_ne_bytes()).unwrap();
    running.wait_for_error("truncated the file of its memory");
    wait_for_status(&lab, "vhost-user: 1 clients were disconnected");
    let served = crate::support::eventually(MOMENT, || {
        let mut front = Frontend::new(shape(1)).unwrap();
        front.connect(&lab.file("s")).is_ok()
            && FrontDisk::new(front).is_ok_and(|disk| disk.geometry().bytes == 4 << 20)
    });
    assert!(served, "the next one is not served");
    running.end();
}

/// Passes a socket for requests of a disk. Returns the end of the machine.
pub(crate) fn requests_of(disk: &FrontDisk) -> UnixStream {
    let (requests, far) = UnixStream::pair().unwrap();
    requests.set_read_timeout(Some(MOMENT)).unwrap();
    disk.front().order(number::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]).unwrap();
    requests
}

/// Waits for the notice of a change, and checks the size that the machine reads then.
pub(crate) fn expect_size(requests: &mut UnixStream, disk: &FrontDisk, bytes: u64) {
    let mut told = [0; 12];
    requests.read_exact(&mut told).unwrap();
    assert_eq!(told, [2_u32, 1, 0].map(u32::to_ne_bytes).concat()[..]);
    let capacity = config(&disk.front()).unwrap()[..8].try_into().unwrap();
    assert_eq!(u64::from_le_bytes(capacity) * 512, bytes);
}

/// Changes the size of a disk of Ringfence by its socket `control`.
pub(crate) fn resize(lab: &Lab, size: &str) -> Finished {
    let words = [lab.program(), "disk", "resize", "./control", size];
    lab.spawn(&words).finish(MOMENT)
}

#[test]
fn machine_has_the_size_of_its_disk_as_soon_as_that_grows() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4);
    let path = file.display().to_string();
    let running = blk(&lab, &path, "--control control");
    let protocol = PROTOCOL | protocol_feature::BACKEND_REQ;
    let disk = connect(&lab, FrontShape { protocol, ..shape(2) });
    let mut requests = requests_of(&disk);
    let resize = |size: &str| resize(&lab, size);
    for (size, bytes) in [("8M", 8_u64 << 20), ("12M", 12 << 20)] {
        let done = resize(size);
        let expected = format!("./control: the disk has {bytes} bytes\n");
        assert_eq!((done.status, &done.stdout), (Some(0), &expected), "{}", done.stderr);
        expect_size(&mut requests, &disk, bytes);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), bytes);
        Workload::new(21).exercise(&disk, 50);
    }
    // Disks only grow.
    let refused = resize("4M");
    assert_ne!(refused.status, Some(0), "{}", refused.stdout);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 12 << 20);
    running.end();
    assert!(!lab.file("control").exists(), "the socket is removed");
    let unanswered = resize("16M");
    assert!(unanswered.stderr.contains("does not answer"), "{}", unanswered.stderr);
}

#[test]
fn machine_on_an_nbd_server_stores_data() {
    require!(Need::Guests, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let image = image_file(&lab, 4).display().to_string();
    let socket = lab.file("nbd");
    let path = socket.display().to_string();
    let _server =
        Background::start(&["nbdkit", "-f", "-U", &path, "file", &image], || listens(&socket));
    let running = blk(&lab, &format!("nbd+unix:///?socket={path}"), "");
    Workload::new(13).exercise(&connect(&lab, shape(1)), 200);
    running.end();
}

#[test]
fn read_only_disk_refuses_writes_and_a_mode_of_pages_is_no_option() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let running = blk(&lab, &format!("{file},ro"), "");
    let disk = connect(&lab, shape(1));
    let failed = Driver::new(disk.queue(1).unwrap()).write(0, &[7; 4096]);
    assert!(failed.is_err());
    running.end();
    let words = ["vhost-user", "blk", "--socket", "s", "--disk", "x,mode=map"];
    let refused = lab.spawn(&[&[lab.program()][..], &words].concat()).finish(MOMENT);
    assert!(refused.stderr.contains("a virtual machine has none"), "{}", refused.stderr);
}

/// The frontend of tests is one for other backends, too: it speaks the protocol, and not a dialect of Ringfence.
#[test]
fn frontend_of_tests_stores_data_through_qemu_storage_daemon() {
    require!(Need::Program("qemu-storage-daemon", "qemu-system-common"));
    let lab = Lab::new();
    let file = image_file(&lab, 4).display().to_string();
    let socket = lab.file("s");
    let node = format!("driver=file,node-name=f,filename={file}");
    let export = format!(
        "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable=on,num-queues=2",
        socket.display()
    );
    let words = ["qemu-storage-daemon", "--blockdev", &node, "--export", &export];
    let _daemon = Background::start(&words, || is_listening(&socket));
    let protocol = PROTOCOL & !protocol_feature::INFLIGHT;
    Workload::new(14).exercise(&connect(&lab, FrontShape { protocol, ..shape(2) }), 200);
}

#[test]
fn kill_at_any_moment_loses_no_request_of_a_machine_and_repeats_none_that_was_answered() {
    require!(Need::Guests);
    let lab = Lab::new();
    let file = image_file(&lab, 4);
    let path = file.display().to_string();
    let mut running = blk(&lab, &path, "");
    let disk = connect(&lab, shape(2));
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicUsize::new(0));
    let load = {
        let (disk, stop, done) = (disk.clone(), Arc::clone(&stop), Arc::clone(&done));
        std::thread::spawn(move || {
            let mut checker = Checker::new();
            let mut driver = Driver::new(disk.queue(16).unwrap());
            let mut running = Workload::new(15).start(&disk);
            while !stop.load(Ordering::Relaxed) {
                running.steps(&mut driver, &mut checker, 20).unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            }
            running.finish(&mut driver, &mut checker).unwrap();
            checker
        })
    };
    let mut random = Random::new(16);
    for round in 0..rounds(10) {
        std::thread::sleep(Duration::from_micros(random.below(30_000)));
        if round % 2 == 0 {
            running.inner("disk").signal(Signal::KILL);
            let finished = running.finish(MOMENT);
            assert!(finished.stderr.contains("was killed"), "{}", finished.stderr);
        } else {
            rustix::process::kill_process(running.pid(), Signal::KILL).unwrap();
            running.finish(MOMENT);
        }
        running = blk(&lab, &path, "");
        disk.reconnect(&lab.file("s")).unwrap();
    }
    // A slow machine gets little work done between two kills.
    let begun = Instant::now();
    while done.load(Ordering::Relaxed) < 20 && !load.is_finished() {
        assert!(begun.elapsed() < 2 * MOMENT, "the load was held up");
        std::thread::sleep(Duration::from_millis(1));
    }
    stop.store(true, Ordering::Relaxed);
    let checker = load.join().unwrap();
    checker.check_read(0, &content(&disk)).unwrap();
    running.end();
    let mut written = vec![0; 4 << 20];
    std::fs::File::open(&file).unwrap().read_exact(&mut written).unwrap();
    checker.check_read(0, &written).unwrap();
}
