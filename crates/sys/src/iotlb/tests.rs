use std::os::unix::net::UnixDatagram;

use ringfence_memory::{Mapping, PAGE_SIZE};

use super::*;

const HERE: u64 = ringfence_memory::FIRST_IO_ADDRESS;
const PAGE: u64 = PAGE_SIZE as u64;

/// A space, and the end at which the kernel would be.
fn space() -> (IotlbSpace, UnixDatagram) {
    let (ours, kernel) = UnixDatagram::pair().unwrap();
    kernel.set_nonblocking(true).unwrap();
    (IotlbSpace::new(ours.into()).unwrap(), kernel)
}

fn pages(count: usize) -> LentSlice {
    Mapping::private(count * PAGE_SIZE).unwrap().lent()
}

/// Returns the last message to the kernel; `None` if there is none.
fn told(kernel: &UnixDatagram) -> Option<[u8; IOTLB_MESSAGE_LEN]> {
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
        assert!(told(&kernel) == Some(iotlb_message(update)), "{given:?}");
        assert_eq!(space.mapped(), 1);
        space.unmap(HERE).unwrap();
        let invalidate = Iotlb::Invalidate { address: HERE, len: 2 * PAGE };
        assert!(told(&kernel) == Some(iotlb_message(invalidate)), "{given:?}");
        assert_eq!(space.mapped(), 0);
    }
    assert_eq!(space.unmap(HERE).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert!(told(&kernel).is_none(), "of what is not mapped the kernel hears nothing");
}

#[test]
fn ranges_that_overlap_are_refused_before_the_kernel_would_cut_them() {
    let (space, kernel) = space();
    let memory = pages(2);
    space.map(HERE + PAGE, &memory, Access::ReadOnly).unwrap();
    assert!(told(&kernel).is_some());
    for address in [HERE, HERE + PAGE, HERE + 2 * PAGE] {
        let error = space.map(address, &memory, Access::ReadOnly).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EEXIST), "{address:#x}");
    }
    let error = space.map(u64::MAX - PAGE, &memory, Access::ReadOnly).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOVERFLOW));
    assert!(told(&kernel).is_none());
}

#[test]
fn no_more_is_mapped_than_the_kernel_keeps() {
    let (mut space, kernel) = space();
    space.entries = 3;
    let memory = pages(1);
    for n in 0..3 {
        space.map(HERE + n * PAGE, &memory, Access::ReadOnly).unwrap();
        assert!(told(&kernel).is_some());
    }
    let error = space.map(HERE + 3 * PAGE, &memory, Access::ReadOnly).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!(told(&kernel).is_none(), "the kernel would drop the oldest");
    space.unmap(HERE).unwrap();
    space.map(HERE + 3 * PAGE, &memory, Access::ReadOnly).unwrap();
}

#[test]
fn what_the_kernel_does_not_take_back_stays_mapped() {
    let (space, kernel) = space();
    let memory = pages(1);
    space.map(HERE, &memory, Access::ReadWrite).unwrap();
    drop(kernel);
    space.unmap(HERE).unwrap_err();
    // Nor is it known whether this was heard.
    space.map(HERE + PAGE, &memory, Access::ReadWrite).unwrap_err();
    assert_eq!(space.mapped(), 2);
}

#[test]
fn misses_are_heard_one_by_one_however_many_there_are() {
    let (space, kernel) = space();
    assert_eq!(space.take_miss().unwrap(), None);
    for n in 0..1000 {
        let miss = Iotlb::Miss { address: n * PAGE, access: IotlbAccess::Write };
        kernel.send(&iotlb_message(miss)).unwrap();
        let heard = space.take_miss().unwrap();
        assert_eq!(heard, Some(Miss { address: n * PAGE, access: Access::ReadWrite }));
    }
    assert_eq!(space.take_miss().unwrap(), None);
    assert_eq!(space.mapped(), 0);
}

#[test]
fn a_message_that_is_no_miss_is_an_error_and_no_silence() {
    let (space, kernel) = space();
    let miss = iotlb_message(Iotlb::Miss { address: HERE, access: IotlbAccess::Read });
    let changed = |at: usize, to: u8| {
        let mut bytes = miss;
        bytes[at] = to;
        bytes
    };
    // Of the first version; an access to nothing, and to more than there is; an UPDATE; a failed access.
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
