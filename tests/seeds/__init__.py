"""The two pages that the mailbox follows, sentence by sentence, each beside the test that holds it.

`000_idempotency_policy.txt` and `001_agent_to_agent.txt` are those pages, one sentence or one line of code to a line.
A test names the sentences that it holds, and says where the contract has decided otherwise. Every sentence has a test,
or a reason why it states nothing that a daemon could do.
"""
