use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;

use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::checker::Checker;
use ringfence_block::storage::testing::powercut::PowerCutDisk;
use ringfence_block::storage::testing::workload::{Failure, Workload};
use ringfence_block::storage::testing::{Driver, conformance, image};
use ringfence_block::storage::{Op, extents};

use ringfence_memory::LentSlice;
use ringfence_sys::descriptors::testing::assert_descriptors_are_refused;
use rustix::net::{AddressFamily, SocketAddrUnix};

use super::*;
use crate::export::{Export, ExportOptions};
use crate::protocol::numbers::{self, chunk, command, option, reply};

struct Place {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        Place { path: directory.path().join("nbd.sock"), _directory: directory }
    }

    fn listen(&self) -> UnixListener {
        let _ = std::fs::remove_file(&self.path);
        UnixListener::bind(&self.path).unwrap()
    }

    fn serve(&self, disk: &Arc<dyn Disk>) -> Export {
        Export::start(self.listen(), disk, ExportOptions::default()).unwrap()
    }

    fn address(&self) -> NbdAddress {
        NbdAddress::Unix { path: self.path.clone(), name: String::new(), tls: None }
    }

    fn open(&self, options: &NbdOptions) -> NbdDisk {
        NbdDisk::open(&self.address(), options).unwrap()
    }
}

fn short() -> NbdOptions {
    NbdOptions {
        connect: Duration::from_secs(2),
        stall: Duration::from_millis(300),
        give_up: Duration::from_secs(10),
        ..NbdOptions::default()
    }
}

#[test]
fn disk_on_own_export_conforms() {
    for sector_size in [512, 4096] {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(5 << 20, sector_size).unwrap());
        let place = Place::new();
        let _export = place.serve(&disk);
        conformance::check(&place.open(&NbdOptions::default()), 9);
    }
}

#[test]
fn disk_over_several_connections_conforms() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(5 << 20, 512).unwrap());
    let place = Place::new();
    let _export = place.serve(&disk);
    let remote = place.open(&NbdOptions { connections: 4, ..NbdOptions::default() });
    assert_eq!(remote.queues_max(), 4);
    conformance::check(&remote, 10);
}

/// Cuts the power of the server's disk again and again. No acknowledged write may be missing for the client,
/// and no acknowledged flush may be lost.
#[test]
fn server_power_cut_loses_no_acknowledged_write() {
    for seed in 0..6 {
        let medium = PowerCutDisk::new(2048, seed);
        let disk: Arc<dyn Disk> = Arc::new(medium.clone());
        let place = Place::new();
        let mut export = Some(place.serve(&disk));
        let remote = place.open(&NbdOptions { journal: 1 << 20, ..short() });
        let mut driver = Driver::new(remote.queue(16).unwrap());
        let mut checker = Checker::new();
        let mut running = Workload::new(seed).start(&remote);
        for _ in 0..8 {
            running.steps(&mut driver, &mut checker, 150).unwrap();
            // The server closes all connections, the power is cut, and another server takes the socket.
            drop(export.take());
            medium.cut();
            export = Some(place.serve(&disk));
        }
        running.finish(&mut driver, &mut checker).unwrap();
        assert_eq!(medium.cuts(), 8);
        // The client sees all acknowledged writes.
        checker.check_read(0, &image_of(driver)).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        drop(export);
    }
}

fn image_of(mut driver: Driver) -> Vec<u8> {
    (0..4).flat_map(|n| driver.read(n << 18, 1 << 18).unwrap()).collect()
}

/// Checks that without a journal lost writes are reported by a failed flush.
#[test]
fn flush_without_journal_fails_after_lost_connection() {
    let medium = PowerCutDisk::new(2048, 3);
    let disk: Arc<dyn Disk> = Arc::new(medium.clone());
    let place = Place::new();
    let export = place.serve(&disk);
    let remote = place.open(&NbdOptions { connections: 2, ..short() });
    let mut driver = Driver::new(remote.queue(4).unwrap());
    driver.write(0, &[1; 512]).unwrap();
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()));
    drop(export);
    let export = place.serve(&disk);
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()), "nothing was lost");
    driver.write(512, &[2; 512]).unwrap();
    drop(export);
    medium.cut();
    let _export = place.serve(&disk);
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Err(libc::EIO));
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Ok(()), "it is said once");
}

/// Checks that the client flushes on its own before the journal is full.
#[test]
fn guest_that_never_flushes_uses_bounded_memory() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(16 << 20, 512).unwrap());
    let place = Place::new();
    let _export = place.serve(&disk);
    let remote = place.open(&NbdOptions { journal: 256 << 10, ..NbdOptions::default() });
    let mut driver = Driver::new(remote.queue(4).unwrap());
    for n in 0..256 {
        driver.write(n << 16, &[3; 1 << 16]).unwrap();
    }
    assert!(image(&*disk).iter().all(|byte| *byte == 3));
}

#[test]
fn requests_fail_while_server_is_gone_and_succeed_after_its_return() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(1 << 20, 512).unwrap());
    let place = Place::new();
    let export = place.serve(&disk);
    let options = NbdOptions { give_up: Duration::from_secs(2), ..short() };
    let remote = place.open(&options);
    let mut driver = Driver::new(remote.queue(4).unwrap());
    driver.write(0, &[1; 512]).unwrap();
    drop(export);
    let begun = Instant::now();
    assert_eq!(driver.read(0, 512), Err(libc::EIO));
    assert!((1900..9000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    let _export = place.serve(&disk);
    let begun = Instant::now();
    while driver.read(0, 512) != Ok(vec![1; 512]) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the server has returned");
    }
}

#[test]
fn unknown_export_is_not_opened() {
    let place = Place::new();
    assert!(NbdDisk::open(&place.address(), &short()).is_err());
    let silent = place.listen();
    let options = NbdOptions { connect: Duration::from_millis(200), ..short() };
    let error = NbdDisk::open(&place.address(), &options).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    drop(silent);
}

/// Starts a scripted server: it negotiates, then calls the script for each connection.
fn hostile(
    place: &Place,
    mut act: impl FnMut(usize, &mut UnixStream) + Send + 'static,
) -> JoinHandle<()> {
    let listener = place.listen();
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().take(3).enumerate() {
            let mut stream = stream.unwrap();
            // The connection that only wakes this thread at the end sends nothing.
            let _ = stream.write_all(&crate::protocol::offer::greeting());
            let mut skip = [0; 4];
            let _ = stream.read_exact(&mut skip);
            while let Some(number) = read_option(&mut stream) {
                if number == option::GO {
                    let mut data = vec![0, 0];
                    data.extend((1u64 << 20).to_be_bytes());
                    data.extend([0, 0b1101]);
                    answer(&mut stream, number, reply::INFO, &data);
                }
                answer(&mut stream, number, reply::ACK, &[]);
                if number == option::GO {
                    break;
                }
            }
            act(n, &mut stream);
        }
    })
}

fn read_option(stream: &mut UnixStream) -> Option<u32> {
    let mut head = [0; 16];
    stream.read_exact(&mut head).ok()?;
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
    let mut data = vec![0; usize::try_from(number(12)).unwrap()];
    stream.read_exact(&mut data).ok()?;
    Some(number(8))
}

fn answer(stream: &mut UnixStream, number: u32, kind: u32, data: &[u8]) {
    let mut bytes = numbers::OPTION_REPLY.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend(data);
    let _ = stream.write_all(&bytes);
}

/// Reads a request and returns its type, cookie and offset.
fn read_request(stream: &mut UnixStream) -> Option<(u16, u64, u64)> {
    let mut bytes = [0; 28];
    stream.read_exact(&mut bytes).ok()?;
    let long = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    Some((u16::from_be_bytes([bytes[6], bytes[7]]), long(8), long(16)))
}

fn reply_with(cookie: u64, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = numbers::STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(chunk::DONE.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Checks servers that send invalid replies on the first connection and valid ones on the second: the request
/// is sent again, and memory holds the second reply.
#[test]
fn invalid_reply_ends_connection_and_request_is_sent_again() {
    type Lie = fn(u64, u64) -> Vec<u8>;
    let lies: [(&str, Lie); 6] = [
        ("a cookie that was not given", |cookie, _| reply_with(cookie + 1, chunk::NONE, &[])),
        ("more than was asked for", |cookie, offset| {
            reply_with(
                cookie,
                chunk::OFFSET_DATA,
                &[&offset.to_be_bytes()[..], &[9; 1024]].concat(),
            )
        }),
        ("less than was asked for", |cookie, offset| {
            reply_with(cookie, chunk::OFFSET_DATA, &[&offset.to_be_bytes()[..], &[9; 100]].concat())
        }),
        ("data from elsewhere", |cookie, offset| {
            let offset = (offset + 512).to_be_bytes();
            reply_with(cookie, chunk::OFFSET_DATA, &[&offset[..], &[9; 512]].concat())
        }),
        ("no reply at all", |_, _| vec![0xAA; 64]),
        ("a reply that ends early", |cookie, _| reply_with(cookie, chunk::NONE, &[])[..9].to_vec()),
    ];
    for (what, lie) in lies {
        let place = Place::new();
        let server = hostile(&place, move |n, stream| {
            let Some((command::READ, cookie, offset)) = read_request(stream) else { return };
            let reply = match n {
                0 => lie(cookie, offset),
                _ => {
                    let data = [&offset.to_be_bytes()[..], &[7; 512]].concat();
                    reply_with(cookie, chunk::OFFSET_DATA, &data)
                }
            };
            let _ = stream.write_all(&reply);
            // The client closes the faulty connection, or it times out.
            let _ = stream.read(&mut [0; 1]);
        });
        let remote = place.open(&short());
        let mut driver = Driver::new(remote.queue(4).unwrap());
        assert_eq!(driver.read(4096, 512), Ok(vec![7; 512]), "{what}");
        drop(driver);
        let _ = UnixStream::connect(&place.path);
        let _ = server.join();
    }
}

/// Checks that a server that hangs is replaced by a new connection, and that the request fails in time if that
/// hangs as well.
#[test]
fn request_to_hanging_server_fails_in_time() {
    let place = Place::new();
    let server = hostile(&place, |_, stream| while read_request(stream).is_some() {});
    let options = NbdOptions { give_up: Duration::from_millis(800), ..short() };
    let remote = place.open(&options);
    let mut driver = Driver::new(remote.queue(4).unwrap());
    let begun = Instant::now();
    assert_eq!(driver.read(0, 512), Err(libc::EIO));
    assert!((700..5000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    drop(driver);
    for _ in 0..3 {
        let _ = UnixStream::connect(&place.path);
    }
    let _ = server.join();
}

#[test]
fn error_of_server_is_error_of_disk() {
    let place = Place::new();
    let server = hostile(&place, |_, stream| {
        while let Some((_, cookie, _)) = read_request(stream) {
            let error = numbers::error::NOSPC.to_be_bytes();
            let payload = [&error[..], &[0, 2], b"no"].concat();
            let _ = stream.write_all(&reply_with(cookie, chunk::ERROR, &payload));
        }
    });
    let remote = place.open(&short());
    let mut driver = Driver::new(remote.queue(4).unwrap());
    assert_eq!(driver.read(0, 512), Err(libc::ENOSPC));
    assert_eq!(driver.run(Op::Flush, 0, 0, vec![]).result, Err(libc::ENOSPC));
    let failure = Workload::new(1).start(&remote).steps(&mut driver, &mut Checker::new(), 50);
    assert!(matches!(failure, Err(Failure::Failed(libc::ENOSPC))), "{failure:?}");
    drop(driver);
    for _ in 0..3 {
        let _ = UnixStream::connect(&place.path);
    }
    let _ = server.join();
}

/// Certificate of an authority that signed nothing; the TLS handshake never starts in these tests.
const AUTHORITY: &str = "\
-----BEGIN CERTIFICATE-----
MIIBiDCCAS+gAwIBAgIUG3an4w+NXGqn3P1PZWCeJZXZwAUwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOdGVzdCBhdXRob3JpdHkwIBcNMjYxMTIxMTYxNTEwWhgPMjEy
NjEwMjgxNjE1MTBaMBkxFzAVBgNVBAMMDnRlc3QgYXV0aG9yaXR5MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAEYchpO2/05hamUPVCFTN2O2lQkULRieOyPLXKoOxS
Ff49YQsBmdLoe5ItDoKhbOc/qq7h79DhtIkp1HyIy1qhc6NTMFEwHQYDVR0OBBYE
FEeJotP7wNnZOSVmURE+aFk0ClQ7MB8GA1UdIwQYMBaAFEeJotP7wNnZOSVmURE+
aFk0ClQ7MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgA4QiUdb9
AEffB84zY1EkiBVGm2SHxb8h/oGZB09+AvsCIG5MoVXUbfsDjVpalYHxWKMGA2nl
WqGLd5TcJClHFyRH
-----END CERTIFICATE-----
";

/// Checks that bytes injected behind the agreement to encrypt end the connection. If they were kept, they
/// would be parsed as encrypted bytes of the server.
#[test]
fn bytes_behind_starttls_agreement_end_the_connection() {
    let place = Place::new();
    let directory = place.path.parent().unwrap().display();
    std::fs::write(format!("{directory}/ca-cert.pem"), AUTHORITY).unwrap();
    let address: NbdAddress = format!(
        "nbds+unix:///?socket={}&tls-certificates={directory}&tls-hostname=localhost",
        place.path.display()
    )
    .parse()
    .unwrap();
    let injected = [&numbers::OPTION_REPLY.to_be_bytes()[..], &[0; 12]].concat();
    for extra in [&injected[..], &[0x16], &[]] {
        let listener = place.listen();
        let sent = extra.to_vec();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&crate::protocol::offer::greeting()).unwrap();
            stream.read_exact(&mut [0; 4]).unwrap();
            assert_eq!(read_option(&mut stream), Some(option::STARTTLS));
            // One segment carries both, as an attacker would send it.
            let mut bytes = numbers::OPTION_REPLY.to_be_bytes().to_vec();
            bytes.extend(option::STARTTLS.to_be_bytes());
            bytes.extend(reply::ACK.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(sent);
            stream.write_all(&bytes).unwrap();
            let mut hello = [0; 1];
            stream.read(&mut hello).map(|count| hello[..count].to_vec()).unwrap_or_default()
        });
        let options = NbdOptions { connect: Duration::from_millis(500), ..short() };
        let error = NbdDisk::open(&address, &options).err().unwrap().to_string();
        let said = server.join().unwrap();
        if extra.is_empty() {
            assert_eq!(said, [0x16], "a handshake of TLS begins: {error}");
        } else {
            let expected = format!("the server sent {} bytes in the clear", extra.len());
            assert!(error.contains(&expected) && said.is_empty(), "{error}, {said:?}");
        }
    }
}

#[test]
fn descriptor_from_the_server_is_refused() {
    let place = Place::new();
    let listener = place.listen();
    let address = SocketAddrUnix::new(place.path.as_path()).unwrap();
    let _client = link::begin(AddressFamily::UNIX, &address).unwrap();
    assert_descriptors_are_refused(listener.accept().unwrap().0);
}

/// Serves a disk at a free TCP port of this host.
fn serve_tcp(disk: &Arc<dyn Disk>) -> (Export, std::net::SocketAddr) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The export uses nothing of the family of its listener.
    let listener = UnixListener::from(std::os::fd::OwnedFd::from(listener));
    (Export::start(listener, disk, ExportOptions::default()).unwrap(), address)
}

#[test]
fn server_that_moved_to_another_address_of_its_name_is_found() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(1 << 20, 512).unwrap());
    let (export, first) = serve_tcp(&disk);
    let known = Arc::new(Mutex::new(vec!["[::1]:1".parse().unwrap(), first]));
    let addresses = Arc::clone(&known);
    let lookup = move |_: &str, _: u16| Ok(addresses.lock().unwrap().clone());
    let endpoint = Endpoint::Tcp(host::Host::with_lookup("a-name", 1, lookup));
    let target = NbdTarget { endpoint, name: String::new(), tls: None };
    let (link, settled) = connect_and_negotiate(&target, Duration::from_secs(10)).unwrap();
    let remote = NbdDisk::new(target, &short(), settled, Some(link)).unwrap();
    let mut driver = Driver::new(remote.queue(4).unwrap());
    driver.write(0, &[1; 512]).unwrap();
    drop(export);
    let (_export, second) = serve_tcp(&disk);
    *known.lock().unwrap() = vec![first, second];
    driver.write(512, &[2; 512]).unwrap();
    assert_eq!(driver.read(0, 1024), Ok([[1; 512], [2; 512]].concat()));
}

#[test]
fn zeros_tell_the_server_to_keep_their_storage_or_not() {
    for (allocate, expected) in [(false, (1 << 20, 3)), (true, (4096, 3))] {
        let memory = MemoryDisk::new(1 << 20, 512).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(memory);
        let place = Place::new();
        let export = place.serve(&disk);
        let remote = place.open(&short());
        let mut driver = Driver::new(remote.queue(4).unwrap());
        driver.write(4096, &[1; 8192]).unwrap();
        let zero = Op::WriteZeroes { allocate };
        driver.run(zero, 4096, 8192, vec![]).result.unwrap();
        // The next server is told again what the first one acknowledged.
        drop(export);
        driver_of(&disk).write(4096, &[1; 8192]).unwrap();
        let _export = place.serve(&disk);
        let list = LentSlice::anonymous(usize::try_from(extents::LIST_BYTES).unwrap());
        let query = vec![list.clone().into()];
        driver.run(Op::Extents, 0, 1 << 20, query).result.unwrap();
        let (len, state) = extents::load(&list).unwrap()[0];
        let flags = u32::from(state.hole) + 2 * u32::from(state.zero);
        assert_eq!((len, flags), expected, "allocate: {allocate}");
        // Reading allocates the memory of this disk.
        assert_eq!(driver.read(4096, 8192), Ok(vec![0; 8192]), "replayed");
    }
}

fn driver_of(disk: &Arc<dyn Disk>) -> Driver {
    Driver::new(disk.queue(1).unwrap())
}
