use proptest::prelude::*;

use super::*;

/// Header of version 3 of a disk of 1 GiB, with the name and format of a backing file.
fn image(backing: &str, format: &str) -> Vec<u8> {
    let mut head = vec![0; 65536];
    let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &16u32.to_be_bytes());
    put(24, &(1u64 << 30).to_be_bytes());
    put(36, &2u32.to_be_bytes());
    put(40, &(3u64 << 16).to_be_bytes());
    put(48, &(1u64 << 16).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    if !format.is_empty() {
        put(104, &0xE279_2ACAu32.to_be_bytes());
        put(108, &u32::try_from(format.len()).unwrap().to_be_bytes());
        put(112, format.as_bytes());
    }
    if !backing.is_empty() {
        put(8, &1024u64.to_be_bytes());
        put(16, &u32::try_from(backing.len()).unwrap().to_be_bytes());
        put(1024, backing.as_bytes());
    }
    head
}

#[test]
fn header_of_image_with_backing_file_is_parsed() {
    let header = Header::parse(&image("base", "raw")).unwrap();
    assert_eq!((header.version, header.bytes, header.cluster()), (3, 1 << 30, 65536));
    assert_eq!((header.l1, header.refcount_table), ((3 << 16, 2), (1 << 16, 65536)));
    let backing = Backing { name: "base".to_owned(), format: Some("raw".to_owned()) };
    assert_eq!(header.backing, Some(backing));
    assert_eq!(Header::parse(&image("", "")).unwrap().backing, None);
}

#[test]
fn l1_table_smaller_than_disk_is_refused() {
    let mut head = image("", "");
    head[36..40].copy_from_slice(&1u32.to_be_bytes());
    let what = "the number of L1 entries";
    assert_eq!(Header::parse(&head), Err(HeaderError::Field { what, value: 1 }));
}

#[test]
fn header_that_ends_early_is_refused() {
    let head = image("base", "raw");
    for len in [0, 3, 4, 8, 72, 103] {
        assert!(Header::parse(&head[..len]).is_err(), "{len} bytes");
    }
    assert_eq!(Header::parse(&head[..1026]), Err(HeaderError::Name));
}

proptest! {
    #[test]
    fn header_of_any_bytes_is_refused_or_bounded(
        changes in proptest::collection::vec((0usize..1100, any::<u8>()), 0..12),
        backing in "[a-z:/.]{0,40}",
        format in "(raw|qcow2|vmdk|)",
        len in 0usize..70_000,
    ) {
        let mut head = image(&backing, &format);
        for (at, value) in changes {
            head[at] = value;
        }
        head.truncate(len);
        fuzzing::header(&head);
    }

    #[test]
    fn random_bytes_behind_magic_are_refused_or_bounded(rest in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzzing::header(&[b"QFI\xfb\0\0\0\x03", &rest[..]].concat());
    }
}
