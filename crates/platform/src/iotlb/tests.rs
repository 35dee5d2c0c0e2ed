use std::os::unix::net::UnixDatagram;

use ringfence_memory::{Mapping, PAGE_SIZE};

use super::*;

const HERE: u64 = ringfence_memory::FIRST_IO_ADDRESS;
const PAGE: u64 = PAGE_SIZE as u64;

/// Returns an address space, and the socket in the kernel's place.
fn space() -> (IotlbSpace, UnixDatagram) {
    let (ours, kernel) = UnixDatagram::pair().unwrap();
    kernel.set_nonblocking(true).unwrap();
    (IotlbSpace::new(ours.into()).unwrap(), kernel)
}

fn pages(count: usize) -> LentSlice {
    Mapping::private(count * PAGE_SIZE).unwrap().lent()
}

/// Returns the next message to the kernel; `None` if there is none.
fn next_message(kernel: &UnixDatagram) -> Option<[u8; IOTLB_MESSAGE_LEN]> {
    let mut bytes = [0; IOTLB_MESSAGE_LEN];
    (kernel.recv(&mut bytes).ok()? == IOTLB_MESSAGE_LEN).then_some(bytes)
}

#[test]
fn issue_is_an_update_and_revoke_an_invalidate_of_the_same_range() {
    let (space, kernel) = space();
    let memory = pages(2);
    for (given, access) in
        [(Access::ReadOnly, IotlbAccess::Read), (Access::ReadWrite, IotlbAccess::ReadWrite)]
    {
        space.map(HERE, &memory, given).unwrap();
        let user_address = memory.device_region().address();
        let update = Iotlb::Update { address: HERE, len: 2 * PAGE, user_address, access };
        assert!(next_message(&kernel) == Some(iotlb_message(update)), "{given:?}");
        assert_eq!(space.mapped(), 1);
        space.unmap(HERE).unwrap();
        let invalidate = Iotlb::Invalidate { address: HERE, len: 2 * PAGE };
        assert!(next_message(&kernel) == Some(iotlb_message(invalidate)), "{given:?}");
        assert_eq!(space.mapped(), 0);
    }
    assert_eq!(space.unmap(HERE).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert!(next_message(&kernel).is_none(), "no message for memory that is not mapped");
}

#[test]
fn overlapping_range_is_refused() {
    let (space, kernel) = space();
    let memory = pages(2);
    space.map(HERE + PAGE, &memory, Access::ReadOnly).unwrap();
    assert!(next_message(&kernel).is_some());
    for address in [HERE, HERE + PAGE, HERE + 2 * PAGE] {
        let error = space.map(address, &memory, Access::ReadOnly).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EEXIST), "{address:#x}");
    }
    let error = space.map(u64::MAX - PAGE, &memory, Access::ReadOnly).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOVERFLOW));
    assert!(next_message(&kernel).is_none());
}

#[test]
fn map_above_limit_of_kernel_is_refused() {
    let (mut space, kernel) = space();
    space.entries = 3;
    let memory = pages(1);
    for n in 0..3 {
        space.map(HERE + n * PAGE, &memory, Access::ReadOnly).unwrap();
        assert!(next_message(&kernel).is_some());
    }
    let error = space.map(HERE + 3 * PAGE, &memory, Access::ReadOnly).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!(next_message(&kernel).is_none(), "otherwise the kernel would drop the oldest entry");
    space.unmap(HERE).unwrap();
    space.map(HERE + 3 * PAGE, &memory, Access::ReadOnly).unwrap();
}

#[test]
fn refused_unmap_leaves_memory_mapped() {
    let (space, kernel) = space();
    let memory = pages(1);
    space.map(HERE, &memory, Access::ReadWrite).unwrap();
    drop(kernel);
    space.unmap(HERE).unwrap_err();
    // The kernel may have received this update, so it counts as mapped.
    space.map(HERE + PAGE, &memory, Access::ReadWrite).unwrap_err();
    assert_eq!(space.mapped(), 2);
}

#[test]
fn each_miss_is_returned_once() {
    let (space, kernel) = space();
    assert_eq!(space.take_miss().unwrap(), None);
    for n in 0..1000 {
        let miss = Iotlb::Miss { address: n * PAGE, access: IotlbAccess::Write };
        kernel.send(&iotlb_message(miss)).unwrap();
        let received = space.take_miss().unwrap();
        assert_eq!(received, Some(Miss { address: n * PAGE, access: Access::ReadWrite }));
    }
    assert_eq!(space.take_miss().unwrap(), None);
    assert_eq!(space.mapped(), 0);
}

#[test]
fn message_other_than_miss_is_an_error() {
    let (space, kernel) = space();
    let miss = iotlb_message(Iotlb::Miss { address: HERE, access: IotlbAccess::Read });
    let changed = |at: usize, to: u8| {
        let mut bytes = miss;
        bytes[at] = to;
        bytes
    };
    // Message of version 1; access of no kind, and of an unknown kind; an UPDATE; a failed access.
    for bytes in [changed(0, 1), changed(32, 0), changed(32, 4), changed(33, 2), changed(33, 4)] {
        kernel.send(&bytes).unwrap();
        let kind = space.take_miss().unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::InvalidData);
    }
    kernel.send(&miss[..71]).unwrap();
    assert_eq!(space.take_miss().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    kernel.send(&miss).unwrap();
    assert_eq!(space.take_miss().unwrap().map(|miss| miss.address), Some(HERE));
}
