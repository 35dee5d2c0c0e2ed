use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::Driver;
use ringfence_block::storage::{DiskQueue, Done, Op, Request};

use super::*;
use crate::protocol::ProtocolError;
use crate::protocol::agree::{ClientHandshake, ClientProgress};
use crate::protocol::numbers::{self, command, command_flag, error, option};

const BYTES: u64 = 64 << 20;

struct Served {
    path: PathBuf,
    _directory: tempfile::TempDir,
    _export: Export,
}

fn serve(options: ExportOptions) -> Served {
    serve_disk(&(Arc::new(MemoryDisk::new(BYTES, 512).unwrap()) as Arc<dyn Disk>), options)
}

fn serve_disk(disk: &Arc<dyn Disk>, options: ExportOptions) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let export = Export::start(listener, disk, options).unwrap();
    Served { path, _directory: directory, _export: export }
}

impl Served {
    /// Connects a client that has sent nothing.
    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream
    }

    /// Connects a client with the option `EXPORT_NAME`, which has simple replies.
    fn client(&self) -> UnixStream {
        self.try_client().unwrap()
    }

    fn try_client(&self) -> io::Result<UnixStream> {
        let mut stream = self.raw();
        let mut text = 3u32.to_be_bytes().to_vec();
        text.extend(numbers::OPTION.to_be_bytes());
        text.extend(option::EXPORT_NAME.to_be_bytes());
        text.extend([0; 4]);
        stream.write_all(&text)?;
        stream.read_exact(&mut [0; 18 + 10])?;
        Ok(stream)
    }

    /// Checks that the export still serves other clients.
    fn check_still_serving(&self) {
        let mut stream = self.client();
        assert_eq!(ask(&mut stream, command::READ, 0, 512), 0);
        stream.read_exact(&mut [0; 512]).unwrap();
    }
}

/// Performs the handshake of a client with structured replies and block status.
fn negotiate(stream: &mut UnixStream) -> Result<(), ProtocolError> {
    let mut handshake = ClientHandshake::new("", false)?;
    let (mut held, mut out) = (vec![], vec![]);
    loop {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).unwrap();
        assert!(read > 0, "the server closed the connection");
        held.extend(&bytes[..read]);
        loop {
            let (used, progress) = handshake.feed(&held, &mut out)?;
            held.drain(..used);
            stream.write_all(&out).unwrap();
            out.clear();
            if let ClientProgress::Ready(settled) = progress {
                assert!(settled.structured && settled.block_status);
                return Ok(());
            }
            if used == 0 {
                break;
            }
        }
    }
}

fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = numbers::REQUEST.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// Sends a request and returns the error number of its simple reply.
fn ask(stream: &mut UnixStream, kind: u16, offset: u64, len: u32) -> u32 {
    stream.write_all(&request(kind, 7, offset, len)).unwrap();
    answer(stream)
}

fn answer(stream: &mut UnixStream) -> u32 {
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..4], numbers::SIMPLE_REPLY.to_be_bytes());
    u32::from_be_bytes(reply[4..8].try_into().unwrap())
}

/// Returns `true` if the other side closed the connection.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn invalid_request_ends_only_its_connection() {
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    stream.write_all(&[0xAA; 28]).unwrap();
    assert!(is_closed(&mut stream));
    let mut stream = served.client();
    stream.write_all(&request(command::WRITE, 1, 0, PAYLOAD_MAX + 512)).unwrap();
    assert!(is_closed(&mut stream), "a payload that is longer than ever allowed");
    let mut stream = served.raw();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_closed(&mut stream));
    served.check_still_serving();
}

#[test]
fn refused_request_is_answered_and_its_payload_skipped() {
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    assert_eq!(ask(&mut stream, command::READ, BYTES, 512), error::INVAL);
    assert_eq!(ask(&mut stream, command::READ, u64::MAX - 511, 512), error::INVAL);
    assert_eq!(ask(&mut stream, command::BLOCK_STATUS, 0, 512), error::INVAL);
    assert_eq!(ask(&mut stream, 4711, 0, 0), error::INVAL);
    let mut write = request(command::WRITE, 7, BYTES - 512, 1 << 20);
    write.extend(vec![0x5A; 1 << 20]);
    stream.write_all(&write).unwrap();
    assert_eq!(answer(&mut stream), error::NOSPC);
    assert_eq!(ask(&mut stream, command::FLUSH, 0, 0), 0, "the stream is still in step");
}

#[test]
fn client_over_handshake_timeout_is_disconnected() {
    let handshake = Duration::from_secs(1);
    let served = serve(ExportOptions { handshake, ..ExportOptions::default() });
    let begun = Instant::now();
    let mut silent = served.raw();
    let mut slow = served.raw();
    slow.write_all(&[0, 0]).unwrap();
    assert!(is_closed(&mut silent) && is_closed(&mut slow));
    assert!(begun.elapsed() < Duration::from_secs(9));
    let mut settled = served.client();
    std::thread::sleep(handshake * 2);
    assert_eq!(ask(&mut settled, command::FLUSH, 0, 0), 0, "who has chosen may be silent");
}

#[test]
fn client_over_limit_is_refused_until_another_disconnects() {
    let served = serve(ExportOptions { clients_max: 2, ..ExportOptions::default() });
    let (first, _second) = (served.client(), served.client());
    for _ in 0..20 {
        let error = negotiate(&mut served.raw()).unwrap_err().to_string();
        assert!(error.contains("2 clients use this disk, which is its limit"), "{error}");
    }
    // Clients that say nothing have no share in the limit and get no more than their number.
    let mut silent: Vec<UnixStream> = (0..server::REFUSED_MAX).map(|_| served.raw()).collect();
    silent.iter_mut().for_each(|stream| stream.read_exact(&mut [0; 18]).unwrap());
    assert!(is_closed(&mut served.raw()));
    drop(silent);
    drop(first);
    let begun = Instant::now();
    let mut third = loop {
        match served.try_client() {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(ask(&mut third, command::READ, 0, 512), 0);
}

/// Checks that the memory of a client that requests far more than it reads is bounded, and that other
/// clients are still served.
#[test]
fn client_that_reads_no_replies_uses_bounded_memory() {
    let served = serve(ExportOptions::default());
    let mut greedy = served.client();
    greedy.set_nonblocking(true).unwrap();
    let read = request(command::READ, 1, 0, 1 << 20);
    let (mut sent, mut refused) = (0, 0);
    while refused < 50 && sent < 100_000 {
        match greedy.write(&read) {
            Ok(written) => {
                assert_eq!(written, read.len(), "a request is not cut");
                sent += 1;
            }
            Err(_) => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    assert!(refused > 0, "100,000 requests for a MiB each were taken");
    served.check_still_serving();
    // The client gets its replies once it reads.
    greedy.set_nonblocking(false).unwrap();
    for _ in 0..32 {
        assert_eq!(answer(&mut greedy), 0);
        greedy.read_exact(&mut vec![0; 1 << 20]).unwrap();
    }
}

#[test]
fn payload_in_pieces_is_written_whole() {
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    let content: Vec<u8> = (0..200_000u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let content = &content[..200_000 - 200_000 % 512];
    let len = u32::try_from(content.len()).unwrap();
    let mut bytes = request(command::WRITE, 7, 4096, len);
    bytes.extend(content);
    bytes.extend(request(command::FLUSH, 8, 0, 0));
    for piece in bytes.chunks(7919) {
        stream.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((answer(&mut stream), answer(&mut stream)), (0, 0));
    assert_eq!(ask(&mut stream, command::READ, 4096, len), 0);
    let mut back = vec![0; content.len()];
    stream.read_exact(&mut back).unwrap();
    assert!(back == content);
    // A payload that is cut off is not written.
    stream.write_all(&request(command::WRITE, 9, 4096, 512)).unwrap();
    stream.write_all(&[0xFF; 100]).unwrap();
    drop(stream);
    let mut stream = served.client();
    assert_eq!(ask(&mut stream, command::READ, 4096, 512), 0);
    let mut back = [0; 512];
    stream.read_exact(&mut back).unwrap();
    assert!(back == content[..512]);
}

#[test]
fn disconnect_request_waits_for_earlier_replies() {
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    let mut bytes = request(command::READ, 1, 0, 4096);
    bytes.extend(request(command::DISCONNECT, 2, 0, 0));
    bytes.extend(request(command::READ, 3, 0, 4096));
    stream.write_all(&bytes).unwrap();
    assert_eq!(answer(&mut stream), 0);
    stream.read_exact(&mut [0; 4096]).unwrap();
    assert!(is_closed(&mut stream), "nothing comes after good-bye");
}

/// Checks that a disk without zeroing is written with zeros.
#[test]
fn write_zeroes_on_disk_without_zeroing_writes_zeros() {
    let geometry = MemoryDisk::new(BYTES, 512).unwrap().geometry();
    let plain = Geometry { write_zeroes: false, discard: None, flush: false, ..geometry };
    assert!(offer(&plain).has(transmission::SEND_WRITE_ZEROES | transmission::SEND_FLUSH));
    assert!(!offer(&plain).has(transmission::SEND_TRIM));

    struct Plain(MemoryDisk);
    impl Disk for Plain {
        fn geometry(&self) -> Geometry {
            Geometry { write_zeroes: false, ..self.0.geometry() }
        }
        fn queue(&self, depth: u32) -> io::Result<Box<dyn ringfence_block::storage::DiskQueue>> {
            self.0.queue(depth)
        }
    }
    let disk: Arc<dyn Disk> = Arc::new(Plain(MemoryDisk::new(BYTES, 512).unwrap()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let export = Export::start(listener, &disk, ExportOptions::default()).unwrap();
    let served = Served { path, _directory: directory, _export: export };
    let mut stream = served.client();
    let mut write = request(command::WRITE, 7, 0, 3 << 20);
    write.extend(vec![0x5A; 3 << 20]);
    stream.write_all(&write).unwrap();
    assert_eq!(answer(&mut stream), 0);
    assert_eq!(ask(&mut stream, command::WRITE_ZEROES, 512, (2 << 20) + 512), 0);
    assert_eq!(ask(&mut stream, command::READ, 0, 3 << 20), 0);
    let mut back = vec![0; 3 << 20];
    stream.read_exact(&mut back).unwrap();
    let end = 512 + (2 << 20) + 512;
    assert!(back[..512].iter().chain(&back[end..]).all(|byte| *byte == 0x5A));
    assert!(back[512..end].iter().all(|byte| *byte == 0));
}

/// Sends a write with its data.
fn write(stream: &mut UnixStream, cookie: u64, offset: u64, data: &[u8]) {
    let len = u32::try_from(data.len()).unwrap();
    let bytes = [&request(command::WRITE, cookie, offset, len)[..], data].concat();
    stream.write_all(&bytes).unwrap();
}

fn read(stream: &mut UnixStream, offset: u64, len: u32) -> Vec<u8> {
    assert_eq!(ask(stream, command::READ, offset, len), 0);
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data).unwrap();
    data
}

#[test]
fn unaligned_requests_change_exactly_their_bytes() {
    const PART: usize = 64 << 10;
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    let mut expected = vec![0u8; PART];
    let mut random = ringfence_block::storage::testing::Random::new(99);
    let mut below = |end: u64| usize::try_from(random.next_u64() % end).unwrap();
    for round in 0..2000u32 {
        let offset = below(PART as u64);
        let len = (below(if round % 3 == 0 { 9000 } else { 600 }) + 1).min(PART - offset);
        let (at, size) = (offset as u64, u32::try_from(len).unwrap());
        match below(4) {
            0 => assert_eq!(read(&mut stream, at, size), expected[offset..offset + len]),
            1 => {
                assert_eq!(ask(&mut stream, command::WRITE_ZEROES, at, size), 0);
                expected[offset..offset + len].fill(0);
            }
            _ => {
                let data = vec![u8::try_from(round % 255 + 1).unwrap(); len];
                write(&mut stream, 7, at, &data);
                assert_eq!(answer(&mut stream), 0);
                expected[offset..offset + len].copy_from_slice(&data);
            }
        }
    }
    assert!(read(&mut stream, 0, u32::try_from(PART).unwrap()) == expected);
    // A trim leaves the sectors at its edges, which it covers in part.
    assert_eq!(ask(&mut stream, command::TRIM, 100, 1000), 0);
    assert_eq!(ask(&mut stream, command::TRIM, 1100, 100), 0);
    assert_eq!(read(&mut stream, 0, 512), expected[..512]);
    assert_eq!(read(&mut stream, 1024, 512), expected[1024..1536]);
}

#[test]
fn largest_unaligned_request_is_served() {
    let served = serve(ExportOptions::default());
    let mut stream = served.client();
    let data = vec![5; PAYLOAD_MAX as usize];
    write(&mut stream, 1, 511, &data);
    assert_eq!(answer(&mut stream), 0);
    assert!(read(&mut stream, 511, PAYLOAD_MAX) == data);
    assert_eq!(read(&mut stream, 510, 1), [0]);
    assert_eq!(read(&mut stream, 511 + u64::from(PAYLOAD_MAX), 1), [0]);
}

#[test]
fn concurrent_writes_to_bytes_of_one_sector_lose_none() {
    const CLIENTS: usize = 4;
    const SECTORS: usize = 8;
    let served = serve(ExportOptions::default());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let mut stream = served.client();
            scope.spawn(move || {
                let mine = (number..SECTORS * 512).step_by(CLIENTS);
                let places: Vec<u64> = mine.map(|place| place as u64).collect();
                for batch in places.chunks(64) {
                    // All at once: the export has them together.
                    let mut bytes = vec![];
                    for place in batch {
                        bytes.extend(request(command::WRITE, 7, *place, 1));
                        bytes.push(u8::try_from(number + 1).unwrap());
                    }
                    stream.write_all(&bytes).unwrap();
                    batch.iter().for_each(|_| assert_eq!(answer(&mut stream), 0));
                }
            });
        }
    });
    let found = read(&mut served.client(), 0, u32::try_from(SECTORS * 512).unwrap());
    let lost =
        found.iter().enumerate().filter(|(at, byte)| usize::from(**byte) != at % CLIENTS + 1);
    assert_eq!(lost.count(), 0);
}

/// Disk that counts the queries of its extents.
struct Counted {
    disk: MemoryDisk,
    queries: Arc<AtomicUsize>,
}

struct CountedQueue {
    queue: Box<dyn DiskQueue>,
    queries: Arc<AtomicUsize>,
}

impl Disk for Counted {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let queries = Arc::clone(&self.queries);
        Ok(Box::new(CountedQueue { queue: self.disk.queue(depth)?, queries }))
    }
}

impl DiskQueue for CountedQueue {
    fn submit(&mut self, request: Request) {
        self.queries.fetch_add(usize::from(request.op == Op::Extents), Ordering::Relaxed);
        self.queue.submit(request);
    }
    fn kick(&mut self) {
        self.queue.kick();
    }
    fn reap(&mut self, done: &mut Vec<Done>) {
        self.queue.reap(done);
    }
    fn wait_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.queue.wait_fd()
    }
}

/// Asks for one extent. Returns its length in bytes, and its flags.
fn one_extent(stream: &mut UnixStream, offset: u64) -> (u32, u32) {
    let len = u32::try_from((BYTES - offset).min(1 << 30)).unwrap();
    let mut bytes = request(command::BLOCK_STATUS, 9, offset, len);
    bytes[4..6].copy_from_slice(&command_flag::REQ_ONE.to_be_bytes());
    stream.write_all(&bytes).unwrap();
    let mut reply = [0; 32];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..4], numbers::STRUCTURED_REPLY.to_be_bytes());
    assert_eq!(reply[16..20], 12u32.to_be_bytes(), "one extent");
    let number = |at: usize| u32::from_be_bytes(reply[at..at + 4].try_into().unwrap());
    (number(24), number(28))
}

#[test]
fn walk_over_8000_extents_asks_the_disk_once_for_hundreds() {
    const PAGE: u64 = 4096;
    const DATA: u64 = 4000;
    let disk = MemoryDisk::new(BYTES, 512).unwrap();
    let mut driver = Driver::new(disk.queue(1).unwrap());
    for number in 0..DATA {
        driver.write((2 * number + 1) * PAGE, &[1; 4096]).unwrap();
    }
    drop(driver);
    let queries = Arc::new(AtomicUsize::new(0));
    let disk: Arc<dyn Disk> = Arc::new(Counted { disk, queries: Arc::clone(&queries) });
    let served = serve_disk(&disk, ExportOptions::default());
    let mut stream = served.raw();
    negotiate(&mut stream).unwrap();
    let (mut at, mut extents) = (0, 0);
    while at < BYTES {
        let (len, flags) = one_extent(&mut stream, at);
        let is_data = at / PAGE % 2 == 1 && at / PAGE < 2 * DATA;
        assert_eq!(flags, if is_data { 0 } else { 3 }, "at {at}");
        at += u64::from(len);
        extents += 1;
    }
    assert_eq!(at, BYTES);
    assert!(extents > 2 * DATA, "{extents} extents");
    // A list has about 511. One that is a second old is not used, so a slow machine may ask more often.
    let count = queries.load(Ordering::Relaxed);
    assert!(count < 200, "the disk was asked {count} times for {extents} extents");
}

#[test]
fn walk_sees_what_was_written_meanwhile() {
    let served = serve(ExportOptions::default());
    let mut driver = served.client();
    write(&mut driver, 7, 1 << 20, &[1; 4096]);
    assert_eq!(answer(&mut driver), 0);
    let mut stream = served.raw();
    negotiate(&mut stream).unwrap();
    assert_eq!(one_extent(&mut stream, 0), (1 << 20, 3));
    write(&mut driver, 7, (1 << 20) + 4096, &[1; 4096]);
    assert_eq!(answer(&mut driver), 0);
    assert_eq!(one_extent(&mut stream, 1 << 20), (8192, 0));
    assert_eq!(ask(&mut driver, command::WRITE_ZEROES, 1 << 20, 8192), 0);
    assert_eq!(one_extent(&mut stream, (1 << 20) + 8192).1, 3);
    assert_eq!(one_extent(&mut stream, 0), (u32::try_from(BYTES).unwrap(), 3));
}
