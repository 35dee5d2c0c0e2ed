//! Disks of a command with their content on an NBD server, nbdkit or QEMU.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ringfence_block::storage::testing::{Driver, lent_with};
use ringfence_block::storage::{Disk, Op};
use ringfence_sys::testing::FreePort;
use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::disks::{Background, URI, image_file, is_listening, listens, served, succeed};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, sha256, write_noise};

/// Copies a file to the disk and back, and compares it with the server's content.
fn copies(lab: &Lab, address: &str) {
    let (content, back) = (lab.file("in"), lab.file("out"));
    write_noise(&content, 16);
    let (from, to) = (content.display(), back.display());
    let script = format!("nbdcopy --flush {from} {URI}0 && nbdcopy {URI}0 {to}");
    lab.script(&format!("--disk {address}"), &script).succeed(MOMENT);
    assert_eq!(sha256(&back), sha256(&content), "{address}");
    assert_eq!(sha256(&lab.file("disk.img")), sha256(&content), "{address}");
}

fn nbdkit(lab: &Lab, image: &str) -> Background {
    let socket = lab.file("nbdkit.sock");
    let _ = fs::remove_file(&socket);
    let path = socket.display().to_string();
    Background::start(&["nbdkit", "-f", "-U", &path, "file", image], || listens(&socket))
}

#[test]
fn server_over_unix_socket_or_tcp_stores_written_data() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("nbdkit", "nbdkit"),
        Need::Program("qemu-nbd", "qemu-utils"),
    );
    let lab = Lab::new();
    let image = image_file(&lab, 16).display().to_string();
    {
        let _server = nbdkit(&lab, &image);
        let socket = lab.file("nbdkit.sock");
        copies(&lab, &format!("nbd+unix:///?socket={},mode=map", socket.display()));
    }
    {
        let port = FreePort::new();
        let text = port.number().to_string();
        let words =
            ["nbdkit", "-f", "-i", "127.0.0.1", "-p", &text, "-e", "a disk", "file", &image];
        let _server = Background::start(&words, || TcpStream::connect(port.address()).is_ok());
        copies(&lab, &format!("nbd://{}/a%20disk", port.address()));
    }
    // The server exits after its first client, so there is only one connection from the first greeting on.
    let socket = lab.file("qemu.sock");
    let path = socket.display().to_string();
    let words = ["qemu-nbd", "-f", "raw", "-k", &path, &image];
    let _server = Background::start(&words, || is_listening(&socket));
    copies(&lab, &format!("nbd+unix:///?socket={path}"));
}

#[test]
fn holes_of_server_are_found() {
    require!(
        Need::Guests,
        Need::Program("nbdinfo", "libnbd-bin"),
        Need::Program("nbdkit", "nbdkit"),
        Need::Program("qemu-nbd", "qemu-utils"),
    );
    let lab = Lab::new();
    let path = image_file(&lab, 16);
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[7; 65536], 1 << 20).unwrap();
    drop(file);
    let image = path.display().to_string();
    let socket = lab.file("qemu.sock");
    let path = socket.display().to_string();
    let words = ["qemu-nbd", "-f", "raw", "-k", &path, &image];
    let expected = [
        ["0", "1048576", "3", "hole,zero"],
        ["1048576", "65536", "0", "data"],
        ["1114112", "15663104", "3", "hole,zero"],
    ];
    for is_nbdkit in [true, false] {
        let (server, socket) = match is_nbdkit {
            true => (nbdkit(&lab, &image), lab.file("nbdkit.sock")),
            false => (Background::start(&words, || is_listening(&socket)), socket.clone()),
        };
        let options = format!("--disk nbd+unix:///?socket={}", socket.display());
        let said = lab.script(&options, &format!("nbdinfo --map {URI}0")).succeed(MOMENT);
        let found: Vec<&str> = said.split_whitespace().collect();
        assert_eq!(found, expected.as_flattened(), "nbdkit: {is_nbdkit}");
        drop(server);
    }
}

#[test]
fn restarted_server_is_reconnected_and_keeps_data() {
    require!(Need::Guests, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let image = image_file(&lab, 4).display().to_string();
    let mut server = Some(nbdkit(&lab, &image));
    let socket = lab.file("nbdkit.sock");
    let disk = format!("nbd+unix:///?socket={}", socket.display());
    let (guest, disk) = served(&lab, &disk);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    for round in 0..5u8 {
        driver.write(u64::from(round) << 16, &[round + 1; 1 << 16]).unwrap();
        drop(server.take());
        // A request that finds no server is completed when one is there again.
        let at = u64::from(round + 8) << 16;
        let memory = lent_with(&[round + 101; 1 << 16]);
        driver.submit(Op::Write { fua: false }, at, 1 << 16, vec![memory.into()]);
        driver.queue().kick();
        std::thread::sleep(Duration::from_millis(100));
        server = Some(nbdkit(&lab, &image));
        assert_eq!(driver.wait().unwrap()[0].result, Ok(()));
    }
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
    drop((driver, disk, guest, server));
    let content = fs::read(&image).unwrap();
    for round in 0..5u8 {
        for (block, byte) in [(round, round + 1), (round + 8, round + 101)] {
            let from = usize::from(block) << 16;
            assert!(content[from..from + (1 << 16)].iter().all(|b| *b == byte), "block {block}");
        }
    }
}

#[test]
fn stopped_server_fails_requests_in_time_and_is_used_after_it_continues() {
    require!(Need::Guests, Need::Program("nbdkit", "nbdkit"));
    let lab = Lab::new();
    let image = image_file(&lab, 4).display().to_string();
    let server = nbdkit(&lab, &image);
    let socket = lab.file("nbdkit.sock");
    // The server answers within these limits on a busy machine, too, and the guest waits longer.
    let disk = format!("nbd+unix:///?socket={},timeout=4,stall=1.5,connect=1.5", socket.display());
    let (_guest, disk) = served(&lab, &disk);
    let mut driver = Driver::new(disk.queue(4).unwrap());
    driver.write(0, &[1; 4096]).unwrap();
    server.stop();
    let begun = Instant::now();
    let written = driver.write(4096, &[2; 4096]);
    let took = begun.elapsed();
    kill_process(server.pid(), Signal::CONT).unwrap();
    assert_eq!(written, Err(libc::EIO));
    assert!(took >= Duration::from_secs(3) && took < MOMENT, "{took:?}");
    // The server answers again only after it continues. Then the disk works as before.
    let until = Instant::now() + MOMENT;
    while driver.write(8192, &[3; 4096]).is_err() {
        assert!(Instant::now() < until, "it is not used again");
    }
    assert_eq!(driver.read(8192, 4096), Ok(vec![3; 4096]));
    assert_eq!(driver.read(0, 4096), Ok(vec![1; 4096]));
}

/// Creates a certificate authority and a certificate for `localhost`, in a directory as nbdkit and libnbd want it.
fn certificates(lab: &Lab) -> String {
    let directory = lab.file("pki");
    fs::create_dir(&directory).unwrap();
    let path = |name: &str| directory.join(name).display().to_string();
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let authority = ["openssl", "req", "-x509", "-days", "2", "-subj", "/CN=test authority"];
    let (ca, ca_key) = (path("ca-cert.pem"), path("ca-key.pem"));
    succeed(&[&authority[..], &key, &["-keyout", &ca_key, "-out", &ca]].concat());
    let (request, extensions) = (path("request"), path("extensions"));
    fs::write(&extensions, "subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n").unwrap();
    for (name, subject) in [("server", "/CN=localhost"), ("client", "/CN=guest")] {
        let own_key = path(&format!("{name}-key.pem"));
        let ask = ["openssl", "req", "-subj", subject];
        succeed(&[&ask[..], &key, &["-keyout", &own_key, "-out", &request]].concat());
        let certificate = path(&format!("{name}-cert.pem"));
        let sign = ["openssl", "x509", "-req", "-days", "2", "-CAcreateserial", "-in", &request];
        let with = ["-CA", &ca, "-CAkey", &ca_key, "-extfile", &extensions, "-out", &certificate];
        succeed(&[&sign[..], &with].concat());
    }
    directory.display().to_string()
}

#[test]
fn tls_disk_works_and_wrong_certificate_is_refused() {
    require!(
        Need::Guests,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("nbdkit", "nbdkit"),
        Need::Program("openssl", "openssl"),
    );
    let lab = Lab::new();
    let image = image_file(&lab, 16).display().to_string();
    let directory = certificates(&lab);
    let held = FreePort::new();
    let port = held.number();
    let (text, pki) = (port.to_string(), format!("--tls-certificates={directory}"));
    // With --tls-verify-peer the server demands a certificate of the client too.
    let words = ["nbdkit", "-f", "-i", "127.0.0.1", "-p", &text, "--tls=require", &pki];
    let words = [&words[..], &["--tls-verify-peer", "file", &image]].concat();
    let _server = Background::start(&words, || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let right = format!("?tls-certificates={directory}&tls-hostname=localhost");
    copies(&lab, &format!("nbds://127.0.0.1:{port}/{right}"));
    let plain_socket = lab.file("plain");
    let words = ["nbdkit", "-f", "-U", plain_socket.to_str().unwrap(), "--tls=off", "null", "1M"];
    let _plain = Background::start(&words, || listens(&plain_socket));
    let (psk_socket, keys) = (lab.file("psk"), lab.file("keys"));
    fs::write(&keys, "guest:00112233445566778899aabbccddeeff\n").unwrap();
    let keys = format!("--tls-psk={}", keys.display());
    let words = ["nbdkit", "-f", "-U", psk_socket.to_str().unwrap(), "--tls=require", &keys];
    let words = [&words[..], &["null", "1M"]].concat();
    let _psk = Background::start(&words, || listens(&psk_socket));
    let psk = psk_socket.display();
    let psk = format!("nbds+unix:///?socket={psk}&tls-certificates={directory}");
    let nameless = lab.file("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(format!("{directory}/ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    let (plain, nameless) = (plain_socket.display(), nameless.display());
    let unix = format!("nbds+unix:///?socket={plain}&tls-certificates={directory}");
    let without = format!("?tls-certificates={nameless}&tls-hostname=localhost");
    for (address, why) in [
        (format!("nbd://127.0.0.1:{port}/"), "requires TLS: use nbds://"),
        (unix, "offers no TLS"),
        (psk, "pre-shared keys (PSK)"),
        (format!("nbds://127.0.0.1:{port}/{without}"), "wants a client certificate"),
        (format!("nbds://127.0.0.1:{port}/?tls-certificates={directory}"), "certificate"),
        (format!("nbds://127.0.0.1:{port}/?tls-certificates=/nowhere"), "/nowhere/ca-cert.pem"),
    ] {
        let finished = lab.run(&format!("--disk {address}"), &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125));
        assert!(finished.stderr.contains(why), "{address}: {}", finished.stderr);
    }
}

#[test]
fn missing_server_is_reported_before_guest_starts() {
    require!(Need::Guests);
    let lab = Lab::new();
    let port = FreePort::new();
    for (address, why) in [
        (format!("nbd://{}", port.address()), "refused"),
        ("nbd+unix:///?socket=/nowhere/s".to_owned(), "No such file"),
    ] {
        let finished = lab.run(&format!("--disk {address}"), &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(125));
        assert!(finished.stderr.contains(why), "{}", finished.stderr);
    }
    lab.assert_no_switch();
}
