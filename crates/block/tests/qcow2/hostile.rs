//! Images from anybody: each is refused with a sentence, or served without a panic.

use std::os::unix::fs::symlink;

use ringfence_block::storage::Disk;
use ringfence_block::storage::Op;
use ringfence_block::storage::qcow2::{ChainError, DEPTH_MAX, HeaderError, OpenChain, QcowDisk};
use ringfence_block::storage::testing::{Driver, Random};

use crate::{Place, options, require_qemu};

/// Overwrites bytes of an image.
fn patch(place: &Place, name: &str, at: usize, bytes: &[u8]) {
    let path = place.path(name);
    let mut image = std::fs::read(&path).unwrap();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(&path, image).unwrap();
}

#[test]
fn image_with_unsupported_feature_is_refused_by_name() {
    require_qemu!();
    let place = Place::new();
    place
        .create("aes", "--object secret,id=s,data=x -o encrypt.format=aes,encrypt.key-secret=s 1M");
    // For LUKS qemu-img measures the time of a hash function, and fails beside a load.
    place.create("luks", "1M");
    patch(&place, "luks", 32, &2_u32.to_be_bytes());
    place.create("snapshot", "1M");
    place.succeed("qemu-img", &["snapshot", "-c", "first", "snapshot"]);
    place.create("extended", "-o extended_l2=on 1M");
    place.create("zstd", "-o compression_type=zstd 1M");
    place.create("dirty", "1M");
    patch(&place, "dirty", 79, &[1]);
    place.create("corrupt", "1M");
    patch(&place, "corrupt", 79, &[2]);
    place.create("unknown", "1M");
    patch(&place, "unknown", 78, &[1]);
    place.create("version", "1M");
    patch(&place, "version", 7, &[4]);
    std::fs::write(place.path("raw"), [0; 4096]).unwrap();
    for (name, wanted) in [
        ("aes", "is encrypted (method 1, AES)"),
        ("luks", "is encrypted (method 2, LUKS)"),
        ("snapshot", "has 1 internal snapshots"),
        ("extended", "extended L2 entries"),
        ("zstd", "zstd"),
        ("dirty", "dirty bit"),
        ("corrupt", "marked as corrupt"),
        ("unknown", "incompatible bits 0x100"),
        ("version", "version 4"),
        ("raw", "is not a qcow2 image"),
    ] {
        let error = place.refusal(name).to_string();
        assert!(error.contains(wanted) && error.contains(name), "{name}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn backing_file_outside_folder_or_without_format_is_refused() {
    require_qemu!();
    let place = Place::new();
    std::fs::create_dir_all(place.path("in/sub")).unwrap();
    std::fs::write(place.path("secret"), vec![1; 1 << 20]).unwrap();
    std::fs::write(place.path("in/sub/base"), vec![2; 1 << 20]).unwrap();
    symlink("../secret", place.path("in/link")).unwrap();
    let create = |name: &str, backing: &str| {
        let args = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "raw", name, "1M"];
        place.succeed("qemu-img", &args);
    };
    let secret = place.path("secret").display().to_string();
    for (number, backing) in
        ["../secret", "link", "sub/../../secret", &secret].into_iter().enumerate()
    {
        let name = format!("in/image{number}");
        create(&name, backing);
        let error = place.refusal(&name);
        assert!(matches!(error, ChainError::Outside { .. }), "{backing}: {error}");
        let any = ringfence_block::storage::qcow2::ImageOptions { any_folder: true, ..options() };
        let opened = OpenChain::open(&place.path(&name), &any, &|_| {});
        assert!(opened.is_ok(), "{backing}: {:?}", opened.err());
    }
    create("in/good", "sub/base");
    let disk = place.open("in/good");
    assert_eq!(Driver::new(disk.queue(1).unwrap()).read(0, 512), Ok(vec![2; 512]));
    create("in/remote", "nbd://localhost/x");
    assert!(matches!(place.refusal("in/remote"), ChainError::NotFile { .. }));
    create("in/absent", "nothing");
    assert!(matches!(place.refusal("in/absent"), ChainError::Member { .. }));
    // The extension with the format follows the header of 112 bytes; an unknown type hides it.
    create("in/unnamed", "sub/base");
    patch(&place, "in/unnamed", 112, &[0x12, 0x34, 0x56, 0x78]);
    assert!(matches!(place.refusal("in/unnamed"), ChainError::NoFormat { .. }));
}

#[test]
fn raw_base_with_header_of_an_image_stays_raw() {
    require_qemu!();
    let place = Place::new();
    std::fs::write(place.path("secret"), vec![1; 1 << 20]).unwrap();
    // A guest wrote an image into its raw disk, whose backing file is a secret.
    place.create("disk", "-b secret -F raw");
    let content = std::fs::read(place.path("disk")).unwrap();
    let size = format!("{}K", content.len() >> 10);
    place.create("image", &format!("-b disk -F raw {size}"));
    let disk = place.open("image");
    let read = Driver::new(disk.queue(1).unwrap()).read(0, 4096).unwrap();
    assert!(read == content[..4096], "the header's own bytes");
}

#[test]
fn loop_and_too_deep_chain_are_refused() {
    require_qemu!();
    let place = Place::new();
    let create = |name: &str, backing: &str| {
        let args = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", name, "1M"];
        place.succeed("qemu-img", &args);
    };
    create("a", "b");
    create("b", "c");
    create("c", "a");
    assert!(matches!(place.refusal("a"), ChainError::Loop { .. }));
    create("self", "./self");
    assert!(matches!(place.refusal("self"), ChainError::Loop { .. }));
    place.create("level0", "1M");
    for level in 1..=DEPTH_MAX {
        create(&format!("level{level}"), &format!("level{}", level - 1));
    }
    assert!(matches!(place.refusal(&format!("level{DEPTH_MAX}")), ChainError::Depth { .. }));
    place.open(&format!("level{}", DEPTH_MAX - 1));
}

#[test]
fn header_with_wrong_tables_is_refused() {
    require_qemu!();
    let place = Place::new();
    let cases: [(&str, usize, &[u8]); 8] = [
        ("a huge L1 table", 36, &[0xFF; 4]),
        ("no L1 table", 36, &[0; 4]),
        ("an L1 table off its cluster", 40, &[0, 0, 0, 0, 0, 3, 0, 8]),
        ("a refcount table at 0", 48, &[0; 8]),
        ("a huge refcount table", 56, &[0xFF; 4]),
        ("a disk of 2^63 bytes", 24, &[0x80, 0, 0, 0, 0, 0, 0, 0]),
        ("refcounts of 2^9 bits", 96, &[0, 0, 0, 9]),
        ("a header longer than its cluster", 100, &[0, 1, 0, 8]),
    ];
    for (what, at, bytes) in cases {
        place.create("image", "1M");
        patch(&place, "image", at, bytes);
        let error = place.refusal("image");
        let field = |error: &HeaderError| matches!(error, HeaderError::Field { .. });
        assert!(
            matches!(&error, ChainError::Header { error, .. } if field(error)),
            "{what}: {error}"
        );
    }
}

/// Opens an image and uses it. Whatever happens is a result.
fn use_it(place: &Place, name: &str) {
    let Ok(chain) = OpenChain::open(&place.path(name), &options(), &|_| {}) else { return };
    let Ok(disk) = QcowDisk::new(chain, &options().file) else { return };
    let bytes = disk.geometry().bytes;
    let mut driver = Driver::new(disk.queue(2).unwrap());
    for at in (0..bytes.min(1 << 20)).step_by(1 << 16) {
        let _ = driver.read(at, 4096);
        let _ = driver.write(at, &[9; 512]);
        let _ = driver.run(Op::WriteZeroes { allocate: at % 2 == 0 }, at, 4096, vec![]);
    }
    let _ = driver.run(Op::Flush, 0, 0, vec![]);
}

#[test]
fn damaged_tables_end_in_errors() {
    require_qemu!();
    let place = Place::new();
    let mut random = Random::new(11);
    for round in 0..60 {
        place.create("image", "-o cluster_size=4K 1M");
        place.succeed("qemu-io", &["-f", "qcow2", "-c", "write 0 256K", "image"]);
        let len = usize::try_from(std::fs::metadata(place.path("image")).unwrap().len()).unwrap();
        // Header, refcount table and block, L1 and L2 table.
        let tables = len.min(6 * 4096);
        for _ in 0..1 + random.below(4) {
            let at = random.index(tables - 8) & !7;
            let value = match random.below(4) {
                0 => random.next_u64(),
                1 => (random.below(16) << 12) | (1 << 63),
                2 => random.below(1 << 56) & !0xFFF,
                _ => u64::MAX,
            };
            let at = if round % 3 == 0 { at % 112 } else { at };
            patch(&place, "image", at, &value.to_be_bytes());
        }
        use_it(&place, "image");
    }
}
