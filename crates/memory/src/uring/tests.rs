use rustix::fs::{FallocateFlags, MemfdFlags};

use super::*;
use crate::mapping::Mapping;

/// Reports a skipped test. Fails if tests are required (`RINGFENCE_TEST_REQUIRE=1`), unless the kernel lacks the
/// feature.
fn skip(reason: &str, error: &std::io::Error) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    let is_lacking = [libc::ENOSYS, libc::EINVAL].map(Some).contains(&error.raw_os_error());
    assert!(!is_required || is_lacking, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

fn ring(depth: u32) -> Option<Uring> {
    let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    match Uring::new(Arc::new(file), depth) {
        Ok(ring) => Some(ring),
        Err(error) => {
            skip(&format!("io_uring is refused here: {error}"), &error);
            None
        }
    }
}

fn wait(ring: &mut Uring) -> Vec<Completion> {
    ring.submit().unwrap();
    let mut done = vec![];
    while ring.room() < ring.slots.len() {
        ring.complete(|completion| done.push(completion));
    }
    done.sort_by_key(|completion| completion.token);
    done
}

#[test]
fn written_pieces_are_read_back() {
    let Some(mut ring) = ring(4) else { return };
    let memory = Mapping::private(8192).unwrap().lent();
    memory.copy_from(100, b"hello").unwrap();
    memory.copy_from(5000, b"world").unwrap();
    let mut pieces = vec![memory.slice(100, 5).unwrap(), memory.slice(5000, 5).unwrap()];
    assert!(ring.write(1, 3, &mut pieces, true));
    assert!(pieces.is_empty());
    assert_eq!(wait(&mut ring), [Completion { token: 1, result: Ok(10) }]);
    let mut pieces = vec![memory.slice(0, 10).unwrap()];
    assert!(ring.read(2, 3, &mut pieces));
    assert!(ring.sync(3));
    let done = wait(&mut ring);
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Ok(10), Ok(0)]);
    assert_eq!(memory.fetch::<10>(0).unwrap().into_unchecked(), *b"helloworld");
}

#[test]
fn operation_on_full_ring_is_refused_and_keeps_memory() {
    let Some(mut ring) = ring(2) else { return };
    assert!(ring.sync(1) && ring.sync(2));
    let mut pieces = vec![LentSlice::anonymous(512)];
    assert!(!ring.read(3, 0, &mut pieces) && !ring.write(3, 0, &mut pieces, false));
    assert_eq!(pieces.len(), 1, "the caller still has its memory");
    assert!(!ring.sync(3) && !ring.fallocate(3, 0, 0, 1));
    assert_eq!(wait(&mut ring).len(), 2);
    assert!(ring.read(3, 0, &mut pieces));
}

#[test]
fn read_into_read_only_memory_is_refused() {
    let Some(mut ring) = ring(2) else { return };
    let file = rustix::fs::memfd_create("m", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    let memory = Mapping::new(&file, 0, 4096, crate::Protection::ReadOnly).unwrap().lent();
    assert!(!ring.read(1, 0, &mut vec![memory.clone()]));
    assert!(ring.write(1, 0, &mut vec![memory], false));
    assert_eq!(wait(&mut ring)[0].result, Ok(4096));
}

#[test]
fn dropped_ring_waits_for_operations_in_flight() {
    let Some(mut ring) = ring(8) else { return };
    for token in 0..8 {
        assert!(ring.write(token, token * 4096, &mut vec![LentSlice::anonymous(4096)], true));
    }
    let file = Arc::clone(ring.file());
    drop(ring);
    // Only this function holds the file: the ring is gone, and its memory with it.
    assert_eq!(Arc::strong_count(&file), 1);
}

#[test]
fn failed_operation_returns_errno() {
    let Some(mut ring) = ring(4) else { return };
    let punch = FallocateFlags::PUNCH_HOLE;
    assert!(ring.fallocate(1, punch.bits(), 0, 4096));
    assert_eq!(wait(&mut ring)[0].result, Err(libc::EOPNOTSUPP), "a punch must keep the size");
    let punch = punch | FallocateFlags::KEEP_SIZE;
    assert!(ring.fallocate(2, punch.bits(), 0, 4096));
    assert_eq!(wait(&mut ring)[0].result, Ok(0));
}

#[test]
fn fixed_operation_outside_registered_memory_is_refused() {
    let Some(mut ring) = ring(4) else { return };
    let memory = Mapping::private(8192).unwrap().lent();
    let first = memory.slice(0, 4096).unwrap();
    assert!(ring.register(0, &first).is_err(), "nothing was prepared");
    if let Err(error) = ring.prepare_registration(2) {
        skip(&format!("no sparse registration here: {error}"), &error);
        return;
    }
    assert!(!ring.write_fixed(1, 0, &first, 0, false));
    ring.register(0, &first).unwrap();
    first.copy_from(512, b"fixed").unwrap();
    let inside = first.slice(512, 512).unwrap();
    assert!(ring.write_fixed(1, 0, &inside, 0, false));
    assert_eq!(wait(&mut ring)[0].result, Ok(512));
    assert!(ring.read_fixed(2, 0, &first.slice(1024, 512).unwrap(), 0));
    assert_eq!(wait(&mut ring)[0].result, Ok(512));
    assert_eq!(first.fetch::<5>(1024).unwrap().into_unchecked(), *b"fixed");
    assert!(!ring.read_fixed(3, 0, &memory.slice(4000, 512).unwrap(), 0), "reaches beyond");
    assert!(!ring.read_fixed(3, 0, &memory.slice(4096, 512).unwrap(), 0), "lies behind");
    assert!(!ring.read_fixed(3, 0, &inside, 1) && !ring.read_fixed(3, 0, &inside, 9));
    ring.unregister(0);
    assert!(!ring.read_fixed(3, 0, &inside, 0), "unregistered");
    ring.register(0, &memory.slice(4096, 4096).unwrap()).unwrap();
    assert!(!ring.read_fixed(3, 0, &inside, 0), "the number stands for other memory now");
}

#[test]
fn file_of_a_ring_is_not_registered() {
    let Some(ring) = ring(4) else { return };
    // A registered file would stay open, and locked, until the kernel has torn down the ring.
    let path = format!("/proc/self/fdinfo/{}", ring.ring.as_raw_fd());
    let info = std::fs::read_to_string(path).unwrap();
    let files = info.lines().find_map(|line| line.strip_prefix("UserFiles:"));
    assert_eq!(files.map(str::trim), Some("0"), "{info}");
}

/// Returns a pool of `count` rings, unless io_uring is refused here.
fn pool(count: usize) -> Option<Arc<UringPool>> {
    let pool = UringPool::new(count, 8);
    if let Some(error) = pool.refusal() {
        skip(&format!("io_uring is refused here: {error}"), error);
        return None;
    }
    Some(Arc::new(pool))
}

fn file() -> Arc<std::os::fd::OwnedFd> {
    let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    Arc::new(file)
}

#[test]
fn ring_of_a_pool_serves_one_user_after_another() {
    let Some(pool) = pool(2) else { return };
    let (first, second) = (pool.take(file(), 100).unwrap(), pool.take(file(), 2).unwrap());
    assert_eq!((first.room(), second.room()), (8, 2), "no deeper than the ring");
    assert!(pool.take(file(), 1).is_none());
    drop(first);
    drop(second);
    for round in 0..3u8 {
        let (file, memory) = (file(), Mapping::private(8192).unwrap().lent());
        let mut ring = pool.take(Arc::clone(&file), 8).unwrap();
        memory.copy_from(0, &[round]).unwrap();
        let mut pieces = vec![memory.slice(0, 1).unwrap(), memory.slice(1, 1).unwrap()];
        assert!(ring.write(1, 7, &mut pieces, true));
        assert_eq!(wait(&mut ring)[0].result, Ok(2));
        let mut pieces = vec![memory.slice(9, 1).unwrap()];
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(ring.read(2, 7, &mut pieces) && ring.sync(3));
        assert!(ring.fallocate(4, punch.bits(), 4096, 4096));
        let mut pieces = vec![memory.slice(10, 1).unwrap(), memory.slice(11, 1).unwrap()];
        assert!(ring.read(5, 7, &mut pieces));
        let results: Vec<_> = wait(&mut ring).iter().map(|done| done.result).collect();
        assert_eq!(results, [Ok(1), Ok(0), Ok(0), Ok(2)]);
        assert_eq!(memory.fetch::<2>(9).unwrap().into_unchecked(), [round, round]);
        // An operation is in flight when the ring changes its user.
        assert!(ring.write(6, 0, &mut vec![memory], true));
        ring.submit().unwrap();
        drop(ring);
        assert_eq!((Arc::strong_count(&file), pool.left()), (1, 2));
    }
}

/// Returns a file whose reads wait until it is written, and its writing end.
fn slow_file() -> (Arc<OwnedFd>, OwnedFd) {
    let (reads, writes) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (Arc::new(reads), writes)
}

#[test]
fn ring_with_an_operation_in_flight_changes_its_user_when_that_has_ended() {
    let Some(pool) = pool(1) else { return };
    let (reads, writes) = slow_file();
    let memory = Mapping::private(4096).unwrap().lent();
    let mut ring = pool.take(reads, 4).unwrap();
    assert!(ring.read(1, 0, &mut vec![memory.clone()]));
    ring.submit().unwrap();
    let mut completed = 0;
    ring.complete(|_| completed += 1);
    assert_eq!(completed, 0, "the file is not written yet");
    std::thread::scope(|scope| {
        let left = scope.spawn(|| {
            drop(ring);
            // The content is there before the ring can have another user.
            (memory.fetch::<4>(0).unwrap().into_unchecked(), pool.left())
        });
        // A ring that did not wait is back in the pool within this time.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let early = pool.left();
        rustix::io::write(&writes, b"data").unwrap();
        assert_eq!(left.join().unwrap(), (*b"data", 1));
        assert_eq!(early, 0, "the kernel still uses the memory of the first user");
    });
}

/// Submits one entry and returns its result.
fn result_of(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
    // SAFETY: the entry's addresses are null. An operation that is not refused fails with them.
    unsafe { ring.submission().push(entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

#[test]
fn ring_of_a_pool_refuses_all_other_operations_and_flags() {
    let Some(pool) = pool(1) else { return };
    let mut ring = pool.free().pop().unwrap();
    let allowed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
    ];
    let mut refused = 0;
    for code in 0..=u8::MAX {
        let mut entry = opcode::Fsync::new(types::Fd(-1)).build();
        // SAFETY: the first byte of an entry is its operation (`linux/io_uring.h`).
        unsafe { *(&raw mut entry).cast::<u8>() = code };
        let result = result_of(&mut ring, &entry);
        if allowed.contains(&code) {
            assert_eq!(result, -libc::EBADF, "operation {code}");
            continue;
        }
        // The kernel has no such operation at all.
        let is_unknown = result == -libc::EINVAL && code > 40;
        assert!(result == -libc::EACCES || is_unknown, "operation {code}: {result}");
        refused += i32::from(result == -libc::EACCES);
    }
    assert!(refused > 30, "{refused}");
    use squeue::Flags;
    for flags in [Flags::FIXED_FILE, Flags::IO_DRAIN, Flags::IO_LINK, Flags::ASYNC] {
        let entry = opcode::Fsync::new(types::Fd(-1)).build().flags(flags);
        assert_eq!(result_of(&mut ring, &entry), -libc::EACCES, "{flags:?}");
    }
}

#[test]
fn ring_of_a_pool_registers_nothing() {
    let Some(pool) = pool(1) else { return };
    let mut ring = pool.take(file(), 1).unwrap();
    let memory = Mapping::private(4096).unwrap().lent();
    assert_eq!(ring.prepare_registration(1).unwrap_err().raw_os_error(), Some(libc::EACCES));
    assert!(ring.register(0, &memory).is_err());
    let denied = |result: io::Result<()>| result.unwrap_err().raw_os_error() == Some(libc::EACCES);
    let submitter = ring.ring.submitter();
    assert!(denied(submitter.register_files(&[0])) && denied(submitter.register_files_sparse(1)));
    assert!(denied(submitter.register_buffers_sparse(1)) && denied(submitter.register_eventfd(0)));
    assert!(denied(submitter.register_personality().map(drop)));
    assert!(submitter.register_restrictions(&mut []).is_err());
    assert!(submitter.register_enable_rings().is_err());
}
