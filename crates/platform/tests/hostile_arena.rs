//! Arenas that break the rules. The hub refuses each of them, and a grantee that received one anyway would
//! not map it. An accepted arena cannot be changed later, because its files are sealed.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::os::fd::OwnedFd;

use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::raw::process::{alone, descriptors, descriptors_settled};
use ringfence_platform::local::raw::{
    RawArena, RawDomain, SEALS, file_bytes, memfd, refusal, reopened,
};
use ringfence_platform::local::{ArenaFault, ArenaFiles, ArenaShape, LocalGrantee, LocalPlatform};
use ringfence_platform::{Access, CopyOps, DomId, GrantStatus, Grantee, Gref, Platform};
use ringfence_wire::grant::{RawGrantEntry, flags};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

const SHAPE: ArenaShape = ArenaShape { writable: 512, read_only: 512, references: 1032 };

struct Scene {
    hub: HubHandle,
    _back: RawDomain,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Scene {
    fn new() -> Scene {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let back = RawDomain::join(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
        Scene { hub, _back: back }
    }

    fn domain(&self) -> RawDomain {
        RawDomain::join(self.hub.admit(None, false).unwrap().1).unwrap()
    }
}

/// Constructor of a file that replaces the correct file of `u64` bytes.
type Substitute = fn(&OwnedFd, u64) -> OwnedFd;

struct Case {
    name: &'static str,
    /// Roles in which the file is tried: writable pages, read-only pages, table, status words.
    roles: &'static [usize],
    rule: &'static str,
    substitute: Substitute,
}

const ALL: &[usize] = &[0, 1, 2, 3];

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

fn socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap().0
}

/// Opens a regular file. One on a tmpfs, where /tmp may be, would have seals, as a memfd has.
fn regular_file() -> OwnedFd {
    rustix::fs::open("/proc/self/comm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

const CASES: &[Case] = &[
    Case {
        name: "no seals",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SealFlags::empty()).unwrap(),
    },
    Case {
        name: "may shrink",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SEALS - SealFlags::SHRINK).unwrap(),
    },
    Case {
        name: "may grow",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SEALS - SealFlags::GROW).unwrap(),
    },
    Case {
        name: "may be sealed further",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SEALS - SealFlags::SEAL).unwrap(),
    },
    Case {
        name: "sealed against writing",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SEALS | SealFlags::WRITE).unwrap(),
    },
    Case {
        name: "sealed against writing from now on, which forbids punching",
        roles: ALL,
        rule: "arena_seals",
        substitute: |_, bytes| memfd(bytes, SEALS | SealFlags::FUTURE_WRITE).unwrap(),
    },
    Case {
        name: "a page too short",
        roles: ALL,
        rule: "arena_size",
        substitute: |_, bytes| memfd(bytes - 4096, SEALS).unwrap(),
    },
    Case {
        name: "a byte too short",
        roles: ALL,
        rule: "arena_size",
        substitute: |_, bytes| memfd(bytes - 1, SEALS).unwrap(),
    },
    Case {
        name: "empty",
        roles: ALL,
        rule: "arena_size",
        substitute: |_, _| memfd(0, SEALS).unwrap(),
    },
    Case {
        name: "a page too long",
        roles: ALL,
        rule: "arena_size",
        substitute: |_, bytes| memfd(bytes + 4096, SEALS).unwrap(),
    },
    Case {
        name: "larger than any memory",
        roles: ALL,
        rule: "arena_size",
        substitute: |_, _| memfd(1 << 42, SEALS).unwrap(),
    },
    Case {
        name: "a regular file",
        roles: ALL,
        rule: "arena_no_memfd",
        substitute: |_, _| regular_file(),
    },
    Case { name: "a pipe", roles: ALL, rule: "arena_no_memfd", substitute: |_, _| pipe().0 },
    Case { name: "a socket", roles: ALL, rule: "arena_no_memfd", substitute: |_, _| socket() },
    Case {
        name: "a device that could block",
        roles: ALL,
        rule: "arena_no_memfd",
        substitute: |_, _| rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap(),
    },
    Case {
        name: "only a path",
        roles: ALL,
        rule: "arena_no_memfd",
        substitute: |file, _| reopened(file, OFlags::PATH).unwrap(),
    },
    Case {
        name: "read-only where it is to be written",
        roles: &[0, 3],
        rule: "arena_mode",
        substitute: |file, _| reopened(file, OFlags::RDONLY).unwrap(),
    },
    Case {
        name: "write-only",
        roles: ALL,
        rule: "arena_mode",
        substitute: |_, bytes| {
            let file = memfd(bytes, SEALS).unwrap();
            reopened(&file, OFlags::WRONLY).unwrap()
        },
    },
];

/// Validates the arena as a grantee does, without regard to the hub's result.
fn verify_as_grantee(arena: RawArena) -> Result<(), ArenaFault> {
    let [writable, read_only, table, status] = arena.handed_over;
    ArenaFiles { writable, read_only, table, status }.verify(SHAPE)
}

#[test]
fn arena_file_that_breaks_rule_is_refused_and_counted() {
    alone("arena_file_that_breaks_rule_is_refused_and_counted", || {
        let scene = Scene::new();
        let mut domain = scene.domain();
        let before = descriptors();
        for Case { name, roles, rule, substitute } in CASES {
            for &role in *roles {
                let mut arena = RawArena::new(SHAPE).unwrap();
                let bytes = file_bytes(SHAPE)[role];
                arena.handed_over[role] = substitute(&arena.handed_over[role], bytes);
                let counted = scene.hub.faults().get(rule).copied().unwrap_or(0);
                let refused = domain.lend(DomId(0), &arena).unwrap_err().refused();
                assert_eq!(refused, Some(8), "{name}, role {role}");
                let faults = scene.hub.faults();
                assert_eq!(faults[rule], counted + 1, "{name}, role {role}: {faults:?}");
                let fault = verify_as_grantee(arena).unwrap_err();
                assert_eq!(fault.kind(), *rule, "{name}, role {role}: {fault}");
                // The hub closes refused files on another thread, and refuses a peer whose files pile up there.
                descriptors_settled(before);
            }
        }
        assert!(descriptors_settled(before) <= before, "the hub kept descriptors");
        domain.lend(DomId(0), &RawArena::new(SHAPE).unwrap()).unwrap();
    });
}

/// A hugetlb memfd accepts the same seals. The kernel creates one even if no huge page is available.
#[test]
fn arena_of_huge_pages_is_refused() {
    let scene = Scene::new();
    let mut domain = scene.domain();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let file = match rustix::fs::memfd_create("huge", flags) {
        Ok(file) => file,
        Err(error) => {
            eprintln!("SKIPPED: this kernel makes no hugetlb memfd ({error})");
            return;
        }
    };
    // 512 pages are one huge page on x86-64; on other machines the kernel refuses the size.
    let bytes = file_bytes(SHAPE)[0];
    if let Err(error) = rustix::fs::ftruncate(&file, bytes) {
        eprintln!("SKIPPED: a huge page is no divisor of {bytes} bytes here ({error})");
        return;
    }
    rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
    let mut arena = RawArena::new(SHAPE).unwrap();
    arena.handed_over[0] = file;
    assert_eq!(domain.lend(DomId(0), &arena).unwrap_err().refused(), Some(8));
    assert_eq!(scene.hub.faults()["arena_file_system"], 1);
    assert_eq!(verify_as_grantee(arena).unwrap_err().kind(), "arena_file_system");
}

/// Checks that a peer can neither add a seal nor change the size.
#[test]
fn accepted_arena_refuses_new_seals_and_sizes() {
    let arena = RawArena::new(SHAPE).unwrap();
    for file in &arena.handed_over {
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::SEAL] {
            assert!(rustix::fs::fcntl_add_seals(file, seal).is_err(), "{seal:?} was added");
        }
        for bytes in [0, 4096, 1 << 30] {
            assert!(rustix::fs::ftruncate(file, bytes).is_err(), "truncated to {bytes}");
        }
    }
    assert_eq!(verify_as_grantee(arena), Ok(()));
}

/// Checks shapes that neither the hub nor a grantee accepts.
#[test]
fn arena_shape_out_of_bounds_is_refused() {
    let scene = Scene::new();
    let mut domain = scene.domain();
    for shape in [
        ArenaShape { writable: 0, read_only: 0, references: 32 },
        ArenaShape { writable: 1, read_only: 1, references: 8 },
        ArenaShape { writable: 1, read_only: 1, references: 0 },
        ArenaShape { writable: 16_385, read_only: 0, references: 32 },
        ArenaShape { writable: u32::MAX, read_only: u32::MAX, references: u32::MAX },
        ArenaShape { writable: 1, read_only: 1, references: 32_777 },
    ] {
        let mut arena = RawArena::new(SHAPE).unwrap();
        arena.shape = shape;
        let refused = domain.lend(DomId(0), &arena).unwrap_err().refused();
        assert_eq!(refused, Some(refusal::QUOTA), "{shape:?}");
        assert!(shape.check().is_err());
    }
}

/// Granter that writes its table by hand, and its grantee.
struct Pair {
    hub: HubHandle,
    _back: LocalPlatform,
    _domain: RawDomain,
    arena: RawArena,
    grantee: LocalGrantee,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Pair {
    fn new() -> Pair {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let back = LocalPlatform::connect(hub.admit(Some(DomId(0)), true).unwrap().1).unwrap();
        let mut domain = RawDomain::join(hub.admit(None, false).unwrap().1).unwrap();
        let arena = RawArena::new(SHAPE).unwrap();
        domain.lend(DomId(0), &arena).unwrap();
        let grantee = back.grantee(domain.domid).unwrap();
        Pair { hub, _back: back, _domain: domain, arena, grantee }
    }
}

/// Checks statuses that only a hand-written table can cause; the conformance suite checks the others.
#[test]
fn use_of_invalid_table_entry_is_refused_and_leaves_no_use() {
    let mut pair = Pair::new();
    let permit = flags::PERMIT_ACCESS;
    let entry = RawGrantEntry::from_fields;
    let cases = [
        (entry(permit, 0, 512), GrantStatus::BadPage),
        (entry(permit, 0, u32::MAX), GrantStatus::BadPage),
        (entry(permit, 1, 0), GrantStatus::PermissionDenied),
        (entry(permit | flags::READ_ONLY, 0, 0), GrantStatus::PermissionDenied),
        (entry(flags::ACCEPT_TRANSFER, 0, 0), GrantStatus::BadGref),
        (entry(flags::TRANSITIVE, 0, 0), GrantStatus::BadGref),
        (RawGrantEntry::INVALID, GrantStatus::BadGref),
    ];
    for (entry, status) in cases {
        pair.arena.set_entry(100, entry);
        let mut mapped = Vec::new();
        pair.grantee.map(&[(Gref(100), Access::ReadWrite)], &mut mapped);
        assert_eq!(mapped[0].as_ref().err(), Some(&status), "{entry:?}");
        let mut ops = CopyOps::new();
        let mut list = ops.begin();
        list.write(Gref(100), 0, &[1; 16]).unwrap();
        pair.grantee.copy(list);
        assert_eq!(ops.statuses(), [status], "{entry:?}");
        assert_eq!(pair.arena.status(100), 0, "a use is left");
    }
}

#[test]
fn xsa_361_map_batch_with_one_bad_grant_maps_other_grants() {
    let mut pair = Pair::new();
    pair.arena.grant(101, DomId(0), 7, false);
    let (good, bad) = ((Gref(101), Access::ReadWrite), (Gref(100), Access::ReadWrite));
    let mut mapped = Vec::new();
    pair.grantee.map(&[good, bad, good], &mut mapped);
    assert!(mapped[0].is_ok() && mapped[1].is_err() && mapped[2].is_ok());
    assert_eq!((pair.arena.status(100), pair.arena.status(101)), (0, 2));
    mapped[0].as_ref().unwrap().copy_from(0, b"shared").unwrap();
    assert_eq!(pair.arena.writable(7).unwrap().fetch::<6>(0).unwrap().into_unchecked(), *b"shared");
    drop(mapped);
    assert_eq!(pair.arena.status(101), 0, "each grant was released once (XSA-371)");
}
