//! Questions of the egress policy: packets and connections that wait for an answer.

use core::time::Duration;

use super::Uplink;
use crate::context::Context;
use crate::egress::{Answer, QuestionId};

impl Uplink {
    /// Applies the answer to a question of the egress policy in all engines of the guest. Returns `false` if no question of this
    /// number waits. The other engines follow before their next frame or event.
    pub fn answer_question(&mut self, id: QuestionId, answer: Answer, now: Duration) -> bool {
        let egress = self.config.policy.get();
        let is_applied = egress.is_some_and(|egress| egress.answer_question(id, answer, now));
        if is_applied {
            self.follow_changes(now);
            self.wake_others();
        }
        is_applied
    }

    /// Handles packets and first bytes again whose questions are over. The usual rules decide on them.
    pub(super) fn follow_answers(&mut self, now: Duration) {
        let Some(egress) = &self.egress else { return };
        let settled = egress.settled();
        if self.settled == settled {
            return;
        }
        self.settled = settled;
        for (frame, meta) in self.held.take_answered() {
            self.frame_alone(&frame, meta, now);
        }
        self.tcp.resume_asked(&mut context!(self, now));
    }
}
