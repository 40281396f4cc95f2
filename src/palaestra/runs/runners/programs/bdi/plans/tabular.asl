// Plans for any environment with numbered states and actions: no knowledge, only learning and a cached policy.

!live.

+!live <- while (.more_episodes) { !play }.

+!play <- .begin_episode; !set_mode; while (not over) { !act }; !review.

// Every third episode, and with a policy every fifth, shows what the skill can do without exploring.
+!set_mode : has_policy(task, _) & episode(N) & N mod 5 > 0 <- .abolish(mode(_)); +mode(follow).
+!set_mode : has_policy(task, _) <- .abolish(mode(_)); +mode(rehearse).
+!set_mode : episode(N) & N mod 3 > 0 <- .abolish(mode(_)); +mode(explore).
+!set_mode <- .abolish(mode(_)); +mode(rehearse).

@follow_policy
+!act : mode(follow) <- .policy_action(task, A); .do(A); .learn(task).
@rehearse
+!act : mode(rehearse) <- .best_action(task, A); .do(A); .learn(task).
@explore
+!act <- .rl_action(task, A); .do(A); .learn(task).

@cache
+!review : mode(rehearse) & outcome(success) & cache_threshold(T) & .confidence(task, C) & C >= T <- .cache_policy(task).
@drop
+!review : has_policy(task, _) & cache_threshold(T) & .confidence(task, C) & C < T / 2 <- .drop_policy(task).
@continue
+!review <- true.
