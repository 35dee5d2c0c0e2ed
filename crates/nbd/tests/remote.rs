//! Disks on servers of other projects: nbdkit and qemu-nbd.
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::workload::Workload;
use ringfence_block::storage::testing::{Driver, Random, conformance};
use ringfence_block::storage::{Disk, Op};
use ringfence_nbd::client::{NbdDisk, NbdOptions};

use support::{Background, wait_for_socket, wait_until};

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn image(&self, bytes: u64) -> String {
        std::fs::File::create(self.path("image")).unwrap().set_len(bytes).unwrap();
        self.text("image")
    }

    fn open(&self, options: &NbdOptions) -> NbdDisk {
        let uri = format!("nbd+unix:///?socket={}", self.text("s"));
        NbdDisk::open(&uri.parse().unwrap(), options).unwrap()
    }

    /// Starts `nbdkit` on the socket and waits until it listens.
    fn nbdkit(&self, args: &[&str]) -> Background {
        let socket = self.text("s");
        let args = [&["-f", "-U", &socket], args].concat();
        self.start("nbdkit", &args)
    }

    fn qemu_nbd(&self, image: &str) -> Background {
        let socket = self.text("s");
        let args = ["-t", "-f", "raw", "--shared=4", "--discard=unmap", "-k", &socket, image];
        self.start("qemu-nbd", &args)
    }

    fn start(&self, program: &str, args: &[&str]) -> Background {
        let socket = self.path("s");
        let _ = std::fs::remove_file(&socket);
        let server = Background::start(program, args);
        wait_until("the server listens", || socket.exists());
        wait_for_socket(&socket);
        server
    }
}

#[test]
fn disk_on_nbdkit_conforms() {
    require_programs!("nbdkit" of "nbdkit");
    for more in [&[][..], &["--no-sr"]] {
        let place = Place::new();
        let args = [more, &["memory", "size=8M"]].concat();
        let _server = place.nbdkit(&args);
        conformance::check(&place.open(&NbdOptions::default()), 21);
    }
}

#[test]
fn disk_on_qemu_nbd_conforms() {
    require_programs!("qemu-nbd" of "qemu-utils");
    let place = Place::new();
    let image = place.image(8 << 20);
    let _server = place.qemu_nbd(&image);
    conformance::check(&place.open(&NbdOptions::default()), 22);
}

#[test]
fn disk_over_several_connections_to_qemu_nbd_conforms() {
    require_programs!("qemu-nbd" of "qemu-utils");
    let place = Place::new();
    let image = place.image(8 << 20);
    let _server = place.qemu_nbd(&image);
    let disk = place.open(&NbdOptions { connections: 3, ..NbdOptions::default() });
    conformance::check(&disk, 23);
}

/// Starts `nbdkit` on a TCP port of IPv4 and opens its disk at `host`. Returns `None` if another process took the port.
fn over_tcp(host: &str) -> Option<(Background, NbdDisk)> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let text = port.to_string();
    let args = ["-f", "-p", &text, "-i", "127.0.0.1", "-e", "a disk", "memory", "size=8M"];
    let server = Background::start("nbdkit", &args);
    let address = format!("nbd://{host}:{port}/a%20disk").parse().unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        if let Ok(disk) = NbdDisk::open(&address, &NbdOptions::default()) {
            return Some((server, disk));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

#[test]
fn disk_over_tcp_conforms() {
    require_programs!("nbdkit" of "nbdkit");
    // The port may be taken by another process between its choice and the start: then another one is tried.
    let (_server, disk) =
        (0..5).find_map(|_| over_tcp("127.0.0.1")).expect("a server that can be reached");
    conformance::check(&disk, 24);
}

#[test]
fn server_of_ipv4_alone_is_found_under_name_with_addresses_of_both_families() {
    require_programs!("nbdkit" of "nbdkit");
    let (_server, disk) = (0..5).find_map(|_| over_tcp("localhost")).expect("a server");
    let mut driver = Driver::new(disk.queue(2).unwrap());
    driver.write(4096, &[1; 4096]).unwrap();
    assert_eq!(driver.read(4096, 4096), Ok(vec![1; 4096]));
}

#[test]
fn oldstyle_server_is_refused_with_reason() {
    require_programs!("nbdkit" of "nbdkit");
    let place = Place::new();
    let _server = place.nbdkit(&["-o", "memory", "size=8M"]);
    let uri = format!("nbd+unix:///?socket={}", place.text("s")).parse().unwrap();
    let error = NbdDisk::open(&uri, &NbdOptions::default()).err().unwrap().to_string();
    assert!(error.contains("newstyle"), "{error}");
}

#[test]
fn error_of_nbdkit_is_error_of_disk() {
    require_programs!("nbdkit" of "nbdkit");
    let place = Place::new();
    let args = ["--filter=error", "memory", "size=8M", "error-pwrite=ENOSPC"];
    let _server = place.nbdkit(&[&args[..], &["error-pwrite-rate=100%"]].concat());
    let mut driver = Driver::new(place.open(&NbdOptions::default()).queue(4).unwrap());
    assert_eq!(driver.write(0, &[1; 512]), Err(libc::ENOSPC));
    assert_eq!(driver.read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn request_to_slow_server_fails_in_time() {
    require_programs!("nbdkit" of "nbdkit");
    let place = Place::new();
    let _server = place.nbdkit(&["--filter=delay", "memory", "size=8M", "delay-read=30"]);
    let options = NbdOptions {
        stall: Duration::from_secs(2),
        give_up: Duration::from_secs(5),
        ..NbdOptions::default()
    };
    let mut driver = Driver::new(place.open(&options).queue(4).unwrap());
    driver.write(0, &[1; 512]).unwrap();
    let begun = Instant::now();
    assert_eq!(driver.read(0, 512), Err(libc::EIO));
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
}

/// Kills a server under load and starts it again. No acknowledged write may be missing, for the client and on
/// the medium.
fn killed_again_and_again(seed: u64, image: &Path, place: &Place, start: impl Fn() -> Background) {
    let mut server = start();
    let options = NbdOptions { journal: 1 << 20, ..NbdOptions::default() };
    let disk = place.open(&options);
    let mut driver = Driver::new(disk.queue(16).unwrap());
    let mut checker = Checker::new();
    let mut running = Workload::new(seed).start(&disk);
    let mut random = Random::new(seed);
    for _ in 0..15 {
        running.steps(&mut driver, &mut checker, 20 + random.index(200)).unwrap();
        server.kill();
        server = start();
    }
    running.steps(&mut driver, &mut checker, 100).unwrap();
    running.finish(&mut driver, &mut checker).unwrap();
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
    server.kill();
    let found = checker.check_read(0, &std::fs::read(image).unwrap());
    found.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
}

#[test]
fn qemu_nbd_killed_under_load_loses_no_acknowledged_write() {
    require_programs!("qemu-nbd" of "qemu-utils");
    let place = Place::new();
    let image = place.image(4 << 20);
    killed_again_and_again(31, &place.path("image"), &place, || place.qemu_nbd(&image));
}

#[test]
fn nbdkit_killed_under_load_loses_no_acknowledged_write() {
    require_programs!("nbdkit" of "nbdkit");
    let place = Place::new();
    let image = place.image(4 << 20);
    let start = || place.nbdkit(&["file", &image]);
    killed_again_and_again(32, &place.path("image"), &place, start);
}
