//! Conformance of the translation table engine `arena`.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod common;

use std::sync::atomic::Ordering::SeqCst;

use ringfence_platform::{Access, DomId, Gref, Platform, WindowView};
use ringfence_testkit::conformance::Outcome;
use ringfence_testkit::conformance::windows::{LEAST, WindowPeer, WindowSuite};

use common::Machine;

/// Correct program that has the grant window mapped.
struct Program(WindowView);

impl WindowPeer for Program {
    fn read(&mut self, gref: Gref) -> Result<Option<u64>, String> {
        let mut out = Vec::new();
        self.0.begin([(gref, Access::ReadOnly)].into_iter(), &mut out);
        let Ok(place) = out.pop().unwrap() else { return Ok(None) };
        let (memory, offset) = self.0.memory(place);
        let tag = memory.load_u64(offset, SeqCst).unwrap();
        self.0.end(gref);
        Ok(Some(tag))
    }

    fn write(&mut self, gref: Gref, tag: u64) -> Result<(), String> {
        let mut out = Vec::new();
        self.0.begin([(gref, Access::ReadWrite)].into_iter(), &mut out);
        let Ok(place) = out.pop().unwrap() else { return Ok(()) };
        let (memory, offset) = self.0.memory(place);
        memory.store_u64(offset, tag, SeqCst).unwrap();
        self.0.end(gref);
        Ok(())
    }
}

#[test]
fn arena_engine_passes_window_conformance_suite() {
    let machine = Machine::new();
    let (guest, neighbour) = (machine.guest(), machine.guest());
    let mut table = guest.window(DomId(0), LEAST).unwrap();
    let mut beside = neighbour.window(DomId(0), LEAST).unwrap();
    let view = machine.toolstack.open_window(guest.domid(), table.handle(), 4096).unwrap();
    let mut peer = Program(view);
    let mut suite = WindowSuite { table: &mut *table, neighbour: &mut *beside, peer: &mut peer };
    let summary = suite.run(&mut |case| assert_eq!(case.outcome, Outcome::Passed, "{}", case.name));
    assert_eq!((summary.passed, summary.failed), (14, 0));
}
