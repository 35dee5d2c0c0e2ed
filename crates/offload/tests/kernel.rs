//! Segmentation compared with a Linux kernel's, byte by byte.
//!
//! The test creates two TAPs on a bridge in its own network namespace. It writes a super-packet with its
//! virtio-net header into the first TAP; the bridge forwards it whole. The second TAP has no offloads, so the
//! kernel segments the packet there and completes the checksums. With checksum offload alone, the kernel
//! leaves them blank. The bytes read from the second TAP must equal those of `Segmenter`.
//!
//! Linux's own bytes are wrong for UDP fragmentation under IPv6 extension headers: it counts their bytes
//! into the fragment offsets. The test checks that this is the only difference.
//!
//! Needs user namespaces (`unshare -rn`), /dev/net/tun, and `ip` with bridges. Without one of them the test
//! prints `SKIPPED` and the reason; with `RINGFENCE_TEST_REQUIRE=1` it fails.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod common;

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::process::Command;
use std::time::{Duration, Instant};

use ringfence_offload::OffloadMeta;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_sys::tap::{Tap, TapOffloads};

use common::{EXTENSIONS_V6, Kind, Recipe, SOURCE_MAC, corpus, difference, segments};

/// Entry of `EXTENSIONS_V6` in which destination options follow a routing header. Linux puts the fragment
/// header in front of them and repeats them in every fragment, where receivers take them for data. Our
/// header is right before UDP. `tests/properties.rs` reassembles these.
const DESTINATION_AFTER_ROUTING: usize = 4;
const INSIDE: &str = "RINGFENCE_TEST_INSIDE";
const LIMIT: Duration = Duration::from_secs(60);

/// Returns `true` inside the namespaces. Otherwise runs the test `name` there.
fn enter_namespaces(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if let Some(missing) = missing_requirement() {
        let required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|v| v == "1");
        assert!(!required, "{name} cannot run: {missing}");
        // Print once for the harness's record, once past it.
        println!("SKIPPED: {missing}");
        let _ = writeln!(std::io::stderr(), "SKIPPED: {name}: {missing}");
        return false;
    }
    let mut test = Command::new("unshare");
    test.arg("-rn").arg(std::env::current_exe().unwrap());
    test.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    let output = test.env(INSIDE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
    // Repeat only the figures of the child's output: the harness's own lines would be counted twice.
    text.lines().filter_map(|line| line.split_once("figures: ")).for_each(|(_, f)| println!("{f}"));
    false
}

/// Returns the requirement that this machine lacks.
fn missing_requirement() -> Option<String> {
    let probe = "ip link add name probe type bridge";
    let said = |out: &std::process::Output| String::from_utf8_lossy(&out.stderr).trim().to_owned();
    if let Err(error) = File::options().read(true).write(true).open("/dev/net/tun") {
        return Some(format!("/dev/net/tun: {error}"));
    }
    match Command::new("unshare").args(["-rn", "true"]).output() {
        Err(_) => return Some("`unshare` is not installed (util-linux)".to_owned()),
        Ok(out) if !out.status.success() => {
            return Some(format!("no user namespaces: {}", said(&out)));
        }
        Ok(_) => {}
    }
    let out = Command::new("unshare").args(["-rn", "sh", "-c", probe]).output().unwrap();
    (!out.status.success()).then(|| format!("`{probe}`: {}", said(&out)))
}

fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Two TAPs and a bridge between them.
struct Kernel {
    from: File,
    to: File,
    buffer: Vec<u8>,
}

impl Kernel {
    /// Creates the TAPs; the second one leaves `offloads` to its reader.
    fn new(offloads: TapOffloads) -> Kernel {
        ip("link add name bridge type bridge mcast_snooping 0");
        ip("link set bridge addrgenmode none");
        let [from, to] = ["from", "to"].map(|name| {
            let tap = Tap::create(name).unwrap();
            ip(&format!("link set {name} addrgenmode none txqueuelen 10000"));
            ip(&format!("link set {name} master bridge up"));
            tap
        });
        ip("link set bridge up");
        let mut to = to;
        to.limit_offloads(offloads).unwrap();
        assert_eq!(to.offloads, offloads);
        Kernel { from: from.fd.into(), to: to.fd.into(), buffer: vec![0; 1 << 17] }
    }

    /// Sends a super-packet and returns `count` frames with their virtio-net headers.
    fn segment(
        &mut self,
        frame: &[u8],
        meta: OffloadMeta,
        count: usize,
    ) -> Result<Vec<(VnetHeader, Vec<u8>)>, String> {
        let header = VnetHeader::for_frame(meta, 0).unwrap().to_modern();
        self.from
            .write_all(&[&header[..], frame].concat())
            .map_err(|error| format!("the kernel refuses the super-packet: {error}"))?;
        let begin = Instant::now();
        let mut frames = Vec::with_capacity(count);
        while frames.len() < count {
            match self.read() {
                Some(frame) => frames.push(frame),
                None if begin.elapsed() > LIMIT => {
                    return Err(format!("{} frames of {count} came", frames.len()));
                }
                None => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        Ok(frames)
    }

    /// The next frame of the corpus, if there is one.
    fn read(&mut self) -> Option<(VnetHeader, Vec<u8>)> {
        loop {
            match self.to.read(&mut self.buffer) {
                Ok(len) => {
                    let (vnet, frame) = self.buffer[..len].split_first_chunk::<MODERN_LEN>()?;
                    if frame[6..12] == SOURCE_MAC {
                        return Some((VnetHeader::from_modern(vnet), frame.to_vec()));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("read: {error}"),
            }
        }
    }
}

/// Copies the IPv6 fragment identification that the kernel chose. Corrects the offsets where Linux counted
/// the extension headers into them, and only if that is the exact difference.
fn align_known_differences(
    recipe: &Recipe,
    ours: &[(Vec<u8>, OffloadMeta)],
    theirs: &mut [Vec<u8>],
) {
    let at = recipe.header_len() - 8;
    let extensions: usize = EXTENSIONS_V6[recipe.ip_options].iter().map(|&(_, len)| len).sum();
    let ids: Vec<_> = theirs.iter().map(|frame| frame[at + 4..at + 8].to_vec()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{recipe:?}: one identification for all");
    for (index, ((ours, _), theirs)) in ours.iter().zip(theirs).enumerate() {
        theirs[at + 4..at + 8].copy_from_slice(&ours[at + 4..at + 8]);
        let field = u16::from_be_bytes([theirs[at + 2], theirs[at + 3]]);
        let surplus = u16::try_from(extensions * index).unwrap();
        theirs[at + 2..at + 4].copy_from_slice(&field.wrapping_sub(surplus).to_be_bytes());
    }
}

/// Sends the whole corpus through the kernel and through `offload`, and compares.
fn compare(offloads: TapOffloads) {
    let mut kernel = Kernel::new(offloads);
    let blank = offloads.contains(TapOffloads::CSUM);
    let (mut compared, mut made, mut misplaced) = (0, 0, 0);
    for recipe in corpus() {
        let (frame, meta) = recipe.build();
        let complete = !blank || recipe.kind == Kind::Ufo;
        let ours = segments(&frame, meta, complete);
        let theirs = match kernel.segment(&frame, meta, ours.len()) {
            Ok(theirs) => theirs,
            Err(why) => panic!("{recipe:?}: {why}"),
        };
        for (vnet, _) in &theirs {
            let left = OffloadMeta { gso: None, ..ours[0].1 };
            let place = if complete { None } else { left.checksum.place() };
            assert_eq!(vnet.offered().unwrap().checksum.place(), place, "{recipe:?}");
        }
        let mut theirs: Vec<_> = theirs.into_iter().map(|(_, frame)| frame).collect();
        if recipe.kind == Kind::Ufo && recipe.is_v6 {
            if recipe.ip_options == DESTINATION_AFTER_ROUTING {
                misplaced += 1;
                continue;
            }
            align_known_differences(&recipe, &ours, &mut theirs);
        }
        for (index, ((ours, _), theirs)) in ours.iter().zip(&theirs).enumerate() {
            assert!(ours == theirs, "{recipe:?}\nsegment {index}: {}", difference(ours, theirs));
        }
        compared += 1;
        made += ours.len();
    }
    assert_eq!(kernel.read(), None, "the kernel made more segments");
    assert!(compared > 9000, "{compared}");
    println!("figures: {compared} super-packets, {made} segments, equal; {misplaced} not compared");
}

#[test]
fn completed_segments_match_kernel() {
    if enter_namespaces("completed_segments_match_kernel") {
        compare(TapOffloads(0));
    }
}

#[test]
fn blank_segments_match_kernel() {
    if enter_namespaces("blank_segments_match_kernel") {
        compare(TapOffloads::CSUM);
    }
}
